"""The methods of the field in examples/methods, by hand: two queries and three responses to each."""
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace

import torch
from toys import bigram, close, moved, settings

from cory.config import import_name
from cory.ppo.agent import Agent
from cory.ppo.rollout import Rollout

QUERIES = "p p p q q q"
GROUP_B = torch.tensor([0, 0, 0, 1, 1, 1])


def numbers(text):
    return torch.tensor([float(Fraction(word)) for word in text.split()])


def require(x, text):
    close(x.flatten(), numbers(text))


class Team:
    """A method in an iteration in which its players give these responses: numbers, which are the rewards."""

    def __init__(self, name, *responses, iteration=1, agents=None, **changes):
        self.responses = iter(responses)
        self.asked = []
        cfg = settings(batch_size=6, mini_batch_size=1, responses_per_query=3, **changes)
        self.task = SimpleNamespace(iteration=iteration, training=True)
        self.task.reward = lambda queries, texts: numbers(" ".join(texts))
        self.task.pioneer_prompts = lambda queries: queries
        self.task.observer_prompts = lambda queries, texts: [q + a for q, a in zip(queries, texts)]
        self.method = import_name(f"examples.methods.{name}")(cfg, self.task)
        models = dict(policy="pi", base="pi0", critic="V", cfg=cfg)
        self.agents = agents or [SimpleNamespace(name=f"llm{i}", kl_coef=i, **models) for i in (1, 2)]
        self.players = self.method.assign_roles(self.agents, iteration)
        self.rollouts = self.method.respond(self.players, QUERIES.split(), self.sample)
        self.rewards = [numbers(" ".join(rollout.text)) for rollout in self.rollouts]
        self.scores = self.method.scores(self.rollouts, self.rewards)

    def sample(self, player, prompts, queries):
        """The KL of the first rollout is 1, of the second 2, ..., half for each token."""
        self.asked.append(" ".join([player.name, *prompts]))
        text = next(self.responses).split()
        ones_BT = torch.ones(6, 2)
        kl_BT = ones_BT * len(self.asked) / 2
        value_BT = numbers("1 2 2 2 3 2 4 2 5 2 6 2").view(6, 2)
        return Rollout(queries, text, prompts, ones_BT, None, ones_BT, None, None, group_B=GROUP_B,
                       kl_BT=kl_BT, value_BT=value_BT)

    def require_scores(self, *expected):
        for score_B, text in zip(self.scores, expected, strict=True):
            require(score_B, text)

    def metrics(self):
        return self.method.team_metrics(self.rollouts, self.rewards)

    def update(self, i):
        role = self.method.roles[i]
        return self.method.update(role, self.players[i], self.rollouts[i], self.scores[i])


def test_ccpo():
    team = Team("ccpo:Ccpo", "10 20 30 40 50 60", "3 5 8 2 11 13", "1 2 6 4 7 19")
    assert team.asked[2] == "llm2 p p p q q q"
    # alone the observer earns 9 / 3 = 3 and 30 / 3 = 10
    team.require_scores("0 2 5 -8 1 3", "3 5 8 2 11 13")
    assert team.metrics() == {"observer_gain": 0.5}         # (0 + 2 + 5 - 8 + 1 + 3) / 6


def test_c3():
    team = Team("c3:C3", "1 2 4 7 8 9", "3 5 10 0 6 18", "12 13 14 15 20 29")
    assert team.asked[1:] == ["llm2 p1 p2 p4 q7 q8 q9", "llm2 p1 p1 p1 q7 q7 q7"]
    require(team.rollouts[1].read_B, "0 0 0 3 3 3")
    # the pioneer is scored by what follows each alternative
    team.require_scores("3 5 10 0 6 18", "12 13 14 15 20 29")


def test_magrpo():
    team = Team("magrpo:Magrpo", "0 1 3 2 4 5", "2 5 10 9 16 21")
    assert team.asked == ["llm1 p p p q q q", "llm2 p p p q q q"]
    team.require_scores("2 6 13 11 20 26", "2 6 13 11 20 26")
    estimate = import_name(team.method.needs["advantage"])
    mask_BT = numbers("1 0").expand(6, 2)
    reward_BT = team.scores[0][:, None].expand(6, 2)
    advantage_BT, _ = estimate(reward_BT, mask_BT, GROUP_B)
    require(advantage_BT, "-5 0 -1 0 6 0 -8 0 1 0 7 0")     # the means are 21 / 3 = 7 and 57 / 3 = 19


def test_atgrpo():
    team = Team("atgrpo:AtGrpo", "1 5 2 8 3 4", "6 7 11 10 20 12")
    assert team.asked[1] == "llm2 p5 p5 p5 q8 q8 q8"
    require(team.rollouts[1].read_B, "1 1 1 3 3 3")
    # 5 + (6 + 7 + 11) / 3 and 8 + (10 + 20 + 12) / 3
    team.require_scores("1 13 2 22 3 4", "6 7 11 10 20 12")


def test_drmas(monkeypatch):
    monkeypatch.setattr("cory.train.ppo_update", lambda *_: {"score": 0.0})
    responses = "13 15 2 23 22 45", "55 66 29 97 123 50"
    team = Team("drmas:DrMas", *responses, partner_reward=0.0)
    # the first three are 10 + (3, 5, -8), with the variance (9 + 25 + 64) / 2 = 49; the others alike
    team.require_scores("3/7 5/7 -8/7 -7/13 -8/13 15/13", "5/19 16/19 -21/19 7/37 33/37 -40/37")
    assert team.update(1) == {"score": 70}          # (55 + 66 + 29 + 97 + 123 + 50) / 6
    estimate = import_name(team.method.needs["advantage"])
    advantage_BT, _ = estimate(numbers("0 3")[None], torch.ones(1, 2))
    require(advantage_BT, "3 3")
    team = Team("drmas:Pooled", *responses, partner_reward=0.0)
    # of both agents 30 + (-17, -15, -28, 25, 36, -1), with the variance 3220 / 5 = 644
    require(team.scores[0][:3] * (644 / 289)**0.5, "-1 -15/17 -28/17")


def test_marft():
    team = Team("marft:Marft", "0 1 3 5 6 7", "4 20 36 52 68 100", gamma=0.5, lam=0.25)
    # the observer's token rewards are -2 and r - 2: A_1 = r - 4, A_0 = -2 + 0.5 * 2 - V_0 + 0.125 A_1
    # of the first r = 4: A_1 = 0, A_0 = -2, 0.5 * (1 - 0.25 * 2) = 0.25
    # of the second r = 20: A_1 = 16, A_0 = -1, 0.5 * (2 - 0.25 * 1) = 0.875
    team.require_scores("0.25 0.875 1.5 2.125 2.75 3.625", "4 20 36 52 68 100")


def test_centralized():
    needs = import_name("examples.methods.centralized:Centralized").needs
    base = bigram()
    llm1 = Agent("llm1", base, settings(**needs), 0)
    llm2 = Agent("llm2", base, settings(**needs), 1)
    critic = llm1.critic
    assert llm2.critic is critic
    for agent in (llm1, llm2):
        assert agent.optimizer.param_groups[1]["params"] == [*critic.parameters()]
    batch = SimpleNamespace(query="ab ab ab fad fad fad".split(), mask_BT=torch.ones(6, 2))
    last_letters = numbers("1 1 1 3 3 3").long()    # b and d, of which hidden states are one-hot
    value_B1 = critic.layers(torch.eye(7)[last_letters])
    close(critic(batch, None), value_B1.expand(6, 2))


def test_debate(monkeypatch):
    # means -2 of all first revisions, and -1, -3, -1.25, -4.5, -1.5, -2.5 of the second; 0 is padding
    logp = {"1": "-1 -3 " * 6, "10": "-1 0  -3 0  -1 -3/2  -5 -4  -1 -2  -2 -3"}

    def judge(rollout, policy, reference, *_):
        assert policy == reference == "pi0"
        assert rollout.prompt_BP == QUERIES.split()
        logp_BT = numbers(logp[rollout.text[0]]).view(6, 2)
        return replace(rollout, logp_BT=logp_BT, mask_BT=logp_BT < 0)

    monkeypatch.setattr("examples.methods.debate.add_logprobs", judge)
    revised = "1 2 3 4 5 6", "10 20 30 40 50 60"
    team = Team("debate:Debate", "7 7 7 8 8 8", "9 9 9 0 0 0", *revised)
    assert team.asked[2:] == ["llm1 p9 p9 p9 q0 q0 q0", "llm2 p7 p7 p7 q8 q8 q8"]
    team.require_scores(*["10 2 30 4 50 6"] * 4)
    assert team.metrics() == {"returned_reward": 17}        # 102 / 6


def test_population(monkeypatch):
    factors = iter([0.8, 1.25])
    monkeypatch.setattr("random.choice", lambda _: next(factors))
    monkeypatch.setattr("cory.train.ppo_update", lambda agent, *_: agent.optimizer.param_groups[0])
    agents = [Agent(name, bigram(), settings(), 0) for name in ("llm1", "llm2")]
    llm1, llm2 = agents
    moved(llm1)
    given = dict(agents=agents, init_kl_coef=0.5)
    Team("population:Population", "1 2 3 4 5 9", "7 8 9 10 11 15", **given)
    Team("population:Population", "0 1 2 3 4 8", "20 21 22 23 24 28", iteration=6, **given)
    assert llm1.memory["fitness"] == 25.5           # (4 - 0.5 * 1) + (23 - 0.5 * 2), as the observer
    assert llm2.memory["fitness"] == 11.5           # (10 - 0.5 * 2) + (3 - 0.5 * 1)
    llm1.kl_coef = 0.4
    llm1.memory["rate"] = 2.0
    old_adam = llm2.optimizer
    team = Team("population:Population", "1 1 1 1 1 1", "2 2 2 2 2 2", iteration=11, **given)
    for name, p in llm2.trainable_parameters().items():
        close(p, llm1.trainable_parameters()[name])
    assert llm2.optimizer is not old_adam
    close(llm2.kl_coef, 0.4 * 0.8)
    assert llm2.memory == {"fitness": 1, "rate": 2 * 1.25}          # of this iteration: 2 - 0.5 * 2
    close(team.update(1)["lr"], 0.05 * 2.5)


def test_distill(monkeypatch):
    monkeypatch.setattr("examples.methods.distill.add_logprobs", lambda *given: given)
    monkeypatch.setattr("cory.train.ppo_update", lambda agent, *given: (agent.cfg.loss, *given))
    team = Team("distill:Distill", "1 2 3 4 5 6", "0 7 1 9 2 8", iteration=7, iterations=9)
    assert team.players == team.agents
    assert team.method.assign_roles([1, 2], 6) == [2, 1]
    loss, given, score_B = team.update(0)
    taught, *how = given
    assert taught.text == ["1", "7", "3", "9", "5", "8"]
    assert taught.prompt_BP == QUERIES.split()
    assert how == ["pi", "pi0", "full", 1, "V"]
    require(score_B, "1 7 3 9 5 8")
    assert team.players[0].cfg.loss == "ppo"
    loss_BT, _ = import_name(loss)(None, None, numbers("-2 -3"), None, None)
    require(loss_BT, "2 3")
    assert team.update(1) == {}
