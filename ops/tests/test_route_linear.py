"""Routing and dense layers."""

import pytest
import torch

import nvfp4
from nvfp4 import format as fmt
from nvfp4 import reference


@pytest.fixture(params=["cpu", "triton"])
def ops(request, triton_ops, device):
    if request.param == "cpu":
        return torch.ops.nvfp4.route, torch.ops.nvfp4.linear, "cpu"
    return triton_ops["route"], triton_ops["linear"], device


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "sqrt_softplus"])
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("experts, top_k", [(4, 1), (60, 6), (16, 4)])
def test_route_is_the_formula(ops, scoring, renormalize, with_bias, experts, top_k):
    route, _, device = ops
    logits = torch.randn(5, experts, generator=torch.Generator().manual_seed(2)) * 3
    bias = torch.randn(experts, generator=torch.Generator().manual_seed(4)) if with_bias else None
    scores = {
        "softmax": lambda v: v.double().softmax(-1),
        "sigmoid": lambda v: v.double().sigmoid(),
        "sqrt_softplus": lambda v: (1 + v.double().exp()).log().sqrt(),
    }[scoring](logits)
    choice = scores if bias is None else scores + bias
    want_ids = choice.sort(descending=True, stable=True).indices[:, :top_k]
    want = scores.gather(1, want_ids)
    want = want / want.sum(1, keepdim=True) if renormalize else want

    def to(t):
        return None if t is None else t.to(device)

    ids, weights = route(to(logits), to(bias), top_k=top_k, scoring=scoring, renormalize=renormalize, scale=2.5)
    assert ids.dtype == torch.int32 and weights.dtype == torch.float32
    assert torch.equal(ids.cpu().long(), want_ids)
    torch.testing.assert_close(weights.cpu().double(), want * 2.5, rtol=1e-5, atol=1e-7)


def test_softmax_with_renormalisation_is_softmax_over_the_chosen(ops):
    route, _, device = ops
    logits = torch.randn(9, 32, generator=torch.Generator().manual_seed(5))
    _, weights = route(logits.to(device), None, top_k=4)
    torch.testing.assert_close(weights.cpu(), logits.topk(4).values.softmax(-1), rtol=1e-5, atol=1e-7)


def test_scale_is_applied_once(ops):
    route, _, device = ops
    _, weights = route(torch.randn(3, 16, device=device), None, top_k=4, scoring="sigmoid", scale=2.5)
    assert weights.sum(1).cpu().tolist() == pytest.approx([2.5] * 3, rel=1e-5)


def test_sigmoid_weights_come_from_the_unbiased_scores(ops):
    route, _, device = ops
    logits, bias = torch.zeros(1, 4, device=device), torch.tensor([0.0, 5.0, 0.0, 1.0], device=device)
    ids, weights = route(logits, bias, top_k=2, scoring="sigmoid", renormalize=False)
    assert ids.tolist() == [[1, 3]] and weights.tolist() == [[0.5, 0.5]]


def test_ties_go_to_the_lowest_ids(ops):
    route, _, device = ops
    ids, _ = route(torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0, 1.0]], device=device), None, top_k=5)
    assert ids.tolist() == [[1, 2, 4, 0, 3]]


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "sqrt_softplus"])
def test_a_row_of_nan_gives_distinct_ids_in_range_and_visible_weights(ops, scoring):
    route, _, device = ops
    logits = torch.zeros(3, 128)
    logits[1] = float("nan")
    logits[2] = -float("inf")
    ids, weights = route(logits.to(device), None, top_k=8, scoring=scoring)
    for row in ids.tolist():
        assert len(set(row)) == 8 and all(0 <= e < 128 for e in row)
    assert weights[1].isnan().all() and weights[0].isfinite().all()


def weight(n, k, seed=0, std=0.05):
    w = torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * std
    g = w.abs().amax() / 2688
    return *nvfp4.quantize(w, g), g


@pytest.mark.parametrize("precision", fmt.PRECISIONS)
@pytest.mark.parametrize("tokens, n, k", [(0, 32, 64), (1, 48, 16), (19, 40, 112)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_linear(ops, precision, tokens, n, k, with_bias):
    _, linear, device = ops
    codes, scales, g = weight(n, k)
    x = torch.randn(tokens, k, generator=torch.Generator().manual_seed(1))
    bias = torch.randn(n) if with_bias else None
    a = torch.tensor(1e-3)

    def to(t):
        return None if t is None else t.to(device)

    got = linear(to(x), to(codes), to(scales), to(g), to(a), to(bias), precision=precision).cpu()
    want = reference.linear(x, codes, scales, g, a, bias, precision=precision)
    assert got.shape == (tokens, n)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    if precision == "w4a16" and tokens:
        dense = x.double() @ nvfp4.dequantize(codes, scales, g).double().T + (0 if bias is None else bias.double())
        torch.testing.assert_close(got.double(), dense, rtol=1e-4, atol=1e-5)


def test_linear_with_a_global_scale_per_row(ops):
    _, linear, device = ops
    codes, scales, g = weight(32, 64)
    x = torch.randn(4, 64)
    per_row = g * torch.linspace(0.5, 2, 32)
    got = linear(x.to(device), codes.to(device), scales.to(device), per_row.to(device)).cpu()
    one = linear(x.to(device), codes.to(device), scales.to(device), g.to(device)).cpu()
    torch.testing.assert_close(got, one * torch.linspace(0.5, 2, 32), rtol=1e-5, atol=1e-7)


def test_linear_scales_before_float16(ops):
    """Raw sums of 3.3e7 must not pass through float16."""
    _, linear, device = ops
    dtype = torch.float32 if device == "cpu" and linear is not torch.ops.nvfp4.linear else torch.float16
    codes = torch.full((16, 1024), 0x77, dtype=torch.uint8, device=device)
    scales = torch.full((16, 128), 0x7E, dtype=torch.uint8, device=device)
    x = torch.full((1, 2048), 6.0, dtype=dtype, device=device)
    y = linear(x, codes, scales, torch.tensor(1e-5, device=device)).float()
    assert y.flatten().tolist() == pytest.approx([2048 * 6 * 6 * 448 * 1e-5] * 16, rel=1e-3)
