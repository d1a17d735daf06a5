"""Statistics of studies by hand, the plan of runs, and a study of seconds."""

import math

import numpy as np
import pytest

from cory.studies import statistics as st


def test_differences_are_paired_by_seed():
    # seeds 0 to 4: +1 each, although they spread by 40; seed 5 is of one variant alone
    d = st.difference({i: 10.0 * i + 1 for i in range(6)}, {i: 10.0 * i for i in range(5)})
    assert (d.mean, d.low, d.high, d.improved, d.seeds) == (1.0, 1.0, 1.0, 1.0, 5)
    assert d.verdict == "higher" and str(d) == "+1.00 [+1.00, +1.00]"


def test_no_verdict_where_the_interval_holds_0_or_seeds_are_few():
    zero = dict.fromkeys(range(5), 0.0)
    d = st.difference({0: 1.0, 1: -1.0, 2: 0.5, 3: -0.2, 4: 0.0}, zero)
    assert d.low < 0 < d.high and d.verdict == "not decided with 5 seeds"
    assert d.improved == pytest.approx((2 + 0.5) / 5)               # a tie counts half
    four = st.difference({i: 1.0 for i in range(4)}, zero)
    assert math.isnan(four.low) and four.verdict == "not decided with 4 seeds" and str(four) == "+1.00"
    none = st.difference({0: math.nan}, {0: 1.0})
    assert none.seeds == 0 and str(none) == "never comparable" and none.verdict.startswith("not decided")
    assert st.difference({i: -1.0 - i for i in range(5)}, zero).verdict == "lower"


def test_the_interval_covers_the_mean_as_often_as_it_says():
    rng, inside = np.random.default_rng(0), 0
    for _ in range(200):
        low, high = st.interval(rng.normal(3.0, 1.0, 12))
        inside += low <= 3.0 <= high
    assert 170 <= inside <= 198                         # the percentile bootstrap of 12 is a little narrow


def test_reward_at_equal_kl_by_hand():
    one = {0: [(0, 0.0), (4, 1.0), (8, 2.0)]}           # at KL 6: 1.5
    other = {0: [(0, 0.0), (6, 1.0)]}
    assert st.at_equal(one, other) == ({0: 1.5}, {0: 1.0})
    assert st.at([(0, 0.0), (5, 1.0), (3, 3.0), (9, 5.0)], 4) == 0.8        # where it is first reached
    assert math.isnan(st.at([(0, 0.0), (1, 1.0)], 2))
