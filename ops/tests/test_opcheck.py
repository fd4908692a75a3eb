"""torch.library.opcheck on every operator, over batch sizes, views of x, and optional arguments given and not."""

import pytest
import torch

import nvfp4

TOKENS = (0, 1, 2, 16, 17, 300)
VIEWS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.T.contiguous().T,
    "offset": lambda x: torch.cat([x.new_zeros(3), x.flatten()])[3:].view(x.shape),
}


def check(name, *args, **kwargs):
    op = getattr(torch.ops.nvfp4, name.split(".")[0])
    overload = getattr(op, name.split(".")[1]) if "." in name else op.default
    torch.library.opcheck(overload, args, kwargs)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("view", VIEWS)
def test_small_operators(make_layer, device, tokens, view):
    layer = make_layer(tokens=max(tokens, 1), experts=4, hidden=32, inter=16)
    x = VIEWS[view](layer.x[:tokens].to(device))
    scale = torch.tensor(1e-3, device=device)
    check("quantize", x, scale)
    check("quantize_per_token", x)
    codes, scales, g = nvfp4.quantize_per_token(x)
    check("dequantize", codes, scales, g, torch.float32)
    check("probe", x, torch.zeros(8, dtype=torch.float64, device=device))
    w, s, _ = (t.to(device) for t in layer.weights[3:])
    for a_scale, precision in ((None, "w4a16"), (scale, "w4a4_static"), (None, "w4a4_per_token")):
        bias = None if a_scale is None else torch.ones(32, device=device)
        check(
            "linear",
            x[:, :16].contiguous() if view == "contiguous" else x[:, :16],
            w[0],
            s[0],
            scale,
            a_scale,
            bias,
            precision=precision,
        )
    check("route", x, None, top_k=2)
    check("route", x, torch.ones(32, device=device), top_k=3, scoring="sigmoid", renormalize=False, scale=2.5)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("view", VIEWS)
def test_moe(make_layer, device, tokens, view):
    options = [
        {},
        {"precision": "w4a4_per_token", "activation": "swigluoai", "alpha": 1.702, "beta": 1.0, "limit": 7.0},
        {"precision": "w4a4_static"},
    ]
    for option in options:
        full = option.get("precision") == "w4a4_static"
        layer = make_layer(tokens=tokens, hidden=32, inter=16, bias=full, scales="expert" if full else None).on(device)
        x, *rest = layer.args()
        expert_map = torch.arange(4, device=device) if full else None
        check("moe", VIEWS[view](x), *rest, expert_map, **option)
        health = nvfp4.health.buffer(1, 4, device)[0]
        check("moe.health", VIEWS[view](x), *rest, expert_map, health, **option)
