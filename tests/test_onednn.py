"""Matrix products through oneDNN, and attention under autocast: the numbers of PyTorch's own, few shapes."""
import itertools

import pytest
import torch

from cory.config import ImdbConfig
from cory.system import onednn as products
from cory.system.machine import prepare_device, settled

onednn = pytest.mark.skipif(not products.AVAILABLE, reason="this PyTorch has no oneDNN for x86")
SIZES = [(1, 3, 5), (15, 3, 5), (64, 33, 257), (301, 16, 40), (17, 1, 1), (77, 5, 1), (20, 77, 6), (5, 0, 4),
         (16, 0, 4), (0, 3, 4), (40, 3, 0)]


@pytest.fixture
def installed():
    """oneDNN's products for one test, and then again what this machine takes."""
    products.install()
    yield
    prepare_device(settled(ImdbConfig(device="cpu")))


@pytest.fixture
def shapes(installed, monkeypatch):
    """The shapes that oneDNN is given."""
    seen, original = [], products.onednn_linear

    def recorded(x, weight, bias=None):
        seen.append((*x.shape, weight.shape[0]))
        return original(x, weight, bias)

    monkeypatch.setattr(products, "onednn_linear", recorded)
    return seen


def stored(rows, columns, how, dtype, generator):
    """By rows, by columns, as a slice of something wider, or one number seen as a whole matrix (as
    `.sum().backward()` makes them).
    """
    x = torch.randn(rows, columns + 5, generator=generator).to(dtype)
    return {"rows": x[:, :columns].contiguous(), "columns": x[:, :columns].t().contiguous().t(),
            "slice": x[:, 2:columns + 2], "expanded": x[:1, :1].expand(rows, columns)}[how]


@onednn
@pytest.mark.parametrize("dtype, atol, rtol", [
    (torch.float32, 2e-5, 1e-6), (torch.bfloat16, 0.05, 0.01), (torch.float64, 1e-12, 1e-12)])
def test_products_are_those_of_float64(shapes, dtype, atol, rtol):
    """Sizes on and off the grid, empty ones, a single column; operands stored in every way."""
    generator = torch.Generator().manual_seed(0)
    for (M, K, N), how_a, how_b in itertools.product(
            SIZES, ("rows", "columns", "slice", "expanded"), ("rows", "columns", "slice")):
        a = stored(M, K, how_a if M and K else "rows", dtype, generator)
        b = stored(K, N, how_b, dtype, generator)
        bias, expected = torch.randn(N, generator=generator).to(dtype), a.double() @ b.double()
        torch.testing.assert_close((a @ b).double(), expected, atol=atol, rtol=rtol,
                                   msg=lambda text: f"{M, K, N, how_a, how_b}: {text}")
        with_bias = torch.addmm(bias, a, b).double()
        torch.testing.assert_close(with_bias, expected + bias.double(), atol=atol, rtol=rtol)
    assert bool(shapes) == (dtype in products.DTYPES)


@onednn
def test_what_oneDNN_cannot_do_is_left_to_pytorch(shapes):
    x, w = torch.randn(32, 8), torch.randn(8, 4)
    for size in ((1,), (32, 1), (32, 4)):                   # broadcast, not one number per column
        bias = torch.randn(size)
        torch.testing.assert_close(torch.addmm(bias, x, w), bias + x @ w)
    scaled = torch.addmm(torch.ones(4), x, w, beta=2, alpha=3)
    torch.testing.assert_close(scaled, 2 + 3 * (x @ w), atol=1e-5, rtol=1e-5)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        x @ torch.randn(7, 4)
    with pytest.raises(RuntimeError, match="same dtype"):
        x.bfloat16() @ w
    assert (torch.arange(64).view(32, 2) @ torch.ones(2, 2, dtype=torch.long))[1].tolist() == [5, 5]


@onednn
def test_gradients_through_a_linear_layer(shapes):
    generator = torch.Generator().manual_seed(0)
    x, w, b = (torch.randn(*size, generator=generator, requires_grad=True)
               for size in ((5, 9, 16), (24, 16), (24,)))
    (torch.nn.functional.linear(x, w, b) ** 2).sum().backward()
    x64, w64 = x.detach().double(), w.detach().double()
    y = x64 @ w64.t() + b.detach()
    expected = 2 * y @ w64, 2 * torch.einsum("btn,btk->nk", y, x64), 2 * y.sum((0, 1))
    for got, gradient in zip((x.grad, w.grad, b.grad), expected):
        torch.testing.assert_close(got.double(), gradient, atol=1e-4, rtol=1e-5)
    assert len(shapes) == 3


@onednn
def test_any_number_of_tokens_meets_few_kernels(shapes):
    """Each new shape costs memory for good: 1,000 numbers of tokens make 8 shapes for each doubling, in
    forward and backward passes.
    """
    w = torch.randn(8, 8)
    for tokens in range(24, 1024):
        x = torch.empty(tokens, 8)
        x @ w, x.t() @ x
    assert 40 < len(set(shapes)) <= 2 * (8 * 6 + 1)


def test_the_grid_is_near():
    for n in range(1, 5000):
        up, down = products.grid(n), products.grid(n, down=True)
        assert down <= n <= up and 8 * (up - n) < n and 8 * (n - down) < n


@pytest.mark.skipif(products.AMX, reason="on AMX attention stays in bfloat16")
@onednn
def test_attention_under_autocast_is_in_float32_but_for_single_queries(installed):
    q, k, v = (torch.randn(2, 3, 7, 4, generator=torch.Generator().manual_seed(i)) for i in range(3))
    mask = torch.ones(7, 7, dtype=torch.bool).tril()
    attention = torch.nn.functional.scaled_dot_product_attention
    for bias in (mask, torch.zeros(7, 7).masked_fill(~mask, -torch.inf)):
        plain = attention(q, k, v, bias)
        with torch.autocast("cpu", torch.bfloat16):
            many = attention(q, k, v, bias.bfloat16() if bias.is_floating_point() else bias)
            one = attention(q[:, :, -1:], k, v)
        assert many.dtype == torch.float32 and one.dtype == torch.bfloat16
        torch.testing.assert_close(many, plain)
        torch.testing.assert_close(one.float(), plain[:, :, -1:], atol=0.02, rtol=0.02)


@onednn
def test_what_was_replaced_comes_back(shapes):
    x = torch.randn(32, 8)
    for switch, seen in ((products.install, 1), (products.remove, 1), (products.install, 2)):
        switch()
        x @ x.t()
        assert len(shapes) == seen
