"""Triton kernels run in the interpreter where there is no GPU, natively where there is one."""

import os
import sys
from pathlib import Path

if not Path("/dev/nvidia0").exists() and not Path("/dev/nvidiactl").exists():
    assert "triton" not in sys.modules or os.environ.get("TRITON_INTERPRET"), (
        "triton was imported before the interpreter was chosen"
    )
    os.environ["TRITON_INTERPRET"] = "1"

from dataclasses import dataclass, replace

import pytest
import torch

import nvfp4
from nvfp4.operators import dequantize, linear, moe, probe, quantize, route

INTERPRETED = os.environ.pop("TRITON_INTERPRET", None)  # kernels decorated from here on are compiled ones again
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    """On for the tests of this folder alone: other folders hold kernels that must not be interpreted."""
    if INTERPRETED:
        monkeypatch.setenv("TRITON_INTERPRET", INTERPRETED)


@dataclass(frozen=True)
class Layer:
    """A random layer: x, routing, and the op's weight tensors."""

    x: torch.Tensor
    ids: torch.Tensor
    router: torch.Tensor
    weights: tuple
    a13: torch.Tensor | None = None
    a2: torch.Tensor | None = None
    bias13: torch.Tensor | None = None
    bias2: torch.Tensor | None = None

    def args(self):
        return (self.x, self.ids, self.router, *self.weights, self.a13, self.a2, self.bias13, self.bias2)

    def on(self, device, dtype=None):
        def move(t):
            return None if t is None else t.to(device)

        fields = {name: move(getattr(self, name)) for name in ("x", "ids", "router", "a13", "a2", "bias13", "bias2")}
        if dtype is not None:
            fields["x"] = fields["x"].to(dtype)
        return replace(self, weights=tuple(map(move, self.weights)), **fields)


def quantized(shape, generator, std=0.05):
    """Random NVFP4 weight [E, N, K]: codes, block scales, global scales [E]."""
    w = torch.randn(shape, generator=generator) * std
    g = w.abs().amax((1, 2)) / 2688
    codes, scales = zip(*(nvfp4.quantize(w[e], g[e]) for e in range(shape[0])), strict=True)
    return torch.stack(codes), torch.stack(scales), g


@pytest.fixture(scope="session")
def make_layer():
    def make(tokens=5, experts=4, hidden=64, inter=32, top_k=2, *, gated=True, seed=0, bias=False, scales=None):
        rng = torch.Generator().manual_seed(seed)
        parts = 2 if gated else 1
        w13, s13, g13 = quantized((experts, parts * inter, hidden), rng)
        w2, s2, g2 = quantized((experts, hidden, inter), rng)
        g13 = torch.stack([g13, g13 * 1.25], 1)[:, :parts].contiguous()
        x = torch.randn(tokens, hidden, generator=rng)
        ids, router = nvfp4.route(torch.randn(tokens, experts, generator=rng), top_k=top_k)
        layer = Layer(x, ids, router, (w13, s13, g13, w2, s2, g2))
        if bias:
            b13, b2 = torch.randn(experts, parts * inter, generator=rng), torch.randn(experts, hidden, generator=rng)
            layer = replace(layer, bias13=b13, bias2=b2)
        if scales is not None:
            shape = (experts,) if scales == "expert" else (1,)
            spread = torch.rand(shape, generator=rng) + 0.5
            layer = replace(layer, a13=spread * 2e-3, a2=spread * 1e-3)
        return layer

    return make


@pytest.fixture(scope="session")
def unit_layer():
    """H = I = 16, two experts, x all ones, every code 1.0, every block scale 1.0: everything is exact.

    g = 16 s_gate, u = 16 s_up, y = 16 s_down act(g, u).
    """

    def make(
        gate=(1 / 16, 1 / 16),
        up=(1 / 16, 1 / 16),
        down=(1 / 16, 1 / 16),
        dtype=torch.bfloat16,
        expert=1,
        x=1.0,
        parts=2,
    ):
        def codes(*shape):
            return torch.full(shape, 0x22, dtype=torch.uint8)

        def ones(*shape):
            return torch.full(shape, 0x38, dtype=torch.uint8)

        g13 = torch.tensor([gate, up][:parts]).T.contiguous()
        weights = (
            codes(2, 16 * parts, 8),
            ones(2, 16 * parts, 1),
            g13,
            codes(2, 16, 8),
            ones(2, 16, 1),
            torch.tensor(down),
        )
        return Layer(
            torch.full((1, 16), x, dtype=dtype), torch.tensor([[expert]], dtype=torch.int32), torch.ones(1, 1), weights
        )

    return make


@pytest.fixture(scope="session")
def device():
    return DEVICE


@pytest.fixture(scope="session")
def triton_ops():
    """The Triton launchers by operator name; on a machine without a GPU they take CPU tensors and are interpreted."""
    return {
        "moe": moe._cuda,
        "moe.health": moe._cuda_health,
        "linear": linear._cuda,
        "route": route._cuda,
        "quantize": quantize._cuda,
        "quantize_per_token": quantize._cuda_per_token,
        "dequantize": dequantize._cuda,
        "probe": probe._cuda,
    }
