"""Conformance of ``torch.ops.nvfp4``: every operator over the batch sizes of serving, every precision, both gate forms.

Weights are arguments, so that other seeds mean updated weights, and a replay must follow them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

import nvfp4  # noqa: F401 (registers the operators)
from graph_tests.case import Case, Routing
from nvfp4.health import COUNTERS

SIZES = (0, 1, 2, 5, 16, 17, 64, 300)
HIDDEN, INTER, EXPERTS, TOP_K = 256, 128, 8, 2
PRECISIONS = ("w4a16", "w4a4_static", "w4a4_per_token")
ROUTING = Routing(ids=1, num_experts=EXPERTS, rows=0, padded=True, nan_rows=True)
SWIGLUOAI = {"activation": "swigluoai", "alpha": 1.702, "beta": 1.0, "limit": 7.0}


def generator(seed: int) -> torch.Generator:
    """Seeded, on the GPU."""
    return torch.Generator(device="cuda").manual_seed(seed)


def activations(g: torch.Generator, size: int, width: int = HIDDEN) -> torch.Tensor:
    """bfloat16 [size, width]."""
    return torch.randn(size, width, device="cuda", generator=g).bfloat16()


def packed(g: torch.Generator, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random codes and moderate block scales of a weight [..., N, K]."""
    *lead, k = shape
    codes = torch.randint(0, 256, (*lead, k // 2), device="cuda", generator=g, dtype=torch.uint8)
    scales = torch.randint(0x28, 0x40, (*lead, k // 16), device="cuda", generator=g, dtype=torch.uint8)
    return codes, scales


def layer(seed: int, size: int, parts: int = 2) -> tuple[Any, ...]:
    """x, ids, router weights and the six weight tensors of a layer."""
    g = generator(seed)
    x = activations(g, size)
    ids = torch.randint(0, EXPERTS, (size, TOP_K), device="cuda", generator=g, dtype=torch.int32)
    router = torch.rand(size, TOP_K, device="cuda", generator=g)
    w13, s13 = packed(g, EXPERTS, parts * INTER, HIDDEN)
    w2, s2 = packed(g, EXPERTS, HIDDEN, INTER)
    g13 = torch.rand(EXPERTS, parts, device="cuda", generator=g) * 1e-2 + 1e-3
    g2 = torch.rand(EXPERTS, device="cuda", generator=g) * 1e-2 + 1e-3
    return x, ids, router, w13, s13, g13, w2, s2, g2


def layer_with_scales(seed: int, size: int, parts: int = 2) -> tuple[Any, ...]:
    """A layer and its static activation scales, one per expert."""
    g = generator(seed + 1)
    scales = [torch.rand(EXPERTS, device="cuda", generator=g) * 1e-3 + 1e-3 for _ in range(2)]
    return *layer(seed, size, parts), *scales


def two_layers(seed: int, size: int) -> tuple[Any, ...]:
    """One routing, two sets of weights."""
    first, second = layer(seed, size), layer(seed + 7, size)
    return *first, *second[3:]


def moe(*args: torch.Tensor, **constants: Any) -> torch.Tensor:
    """The operator, any precision."""
    return torch.ops.nvfp4.moe(*args, **constants)


def run_two_layers(x, ids, router, *weights):
    """Two calls after each other share one pool."""
    y = torch.ops.nvfp4.moe(x, ids, router, *weights[:6])
    return torch.ops.nvfp4.moe(y, ids, router, *weights[6:])


def moe_with_health(x, ids, router, *weights):
    """Counters start at zero in every call, so that the result is a function of the inputs."""
    row = torch.zeros(COUNTERS + EXPERTS, dtype=torch.int64, device=x.device)
    y = torch.ops.nvfp4.moe.health(x, ids, router, *weights, None, None, None, None, None, row)
    return y, row


def routed_block(logits_from, x, *weights):
    """Router, routing and experts."""
    ids, router = torch.ops.nvfp4.route(x @ logits_from, None, top_k=TOP_K)
    return torch.ops.nvfp4.moe(x, ids, router, *weights) + x


def block_inputs(seed: int, size: int) -> tuple[Any, ...]:
    """A router weight, x, and a layer's weights."""
    x, _, _, *weights = layer(seed, size)
    router = torch.randn(HIDDEN, EXPERTS, device="cuda", generator=generator(seed + 3)).bfloat16()
    return router, x, *weights


def probed(x):
    """Statistics of x, started at zero."""
    stats = torch.zeros(8, dtype=torch.float64, device=x.device)
    torch.ops.nvfp4.probe(x, stats)
    return stats


def one_tensor(seed: int, size: int) -> tuple[Any, ...]:
    """X [size, HIDDEN]."""
    return (activations(generator(seed), size),)


def with_scale(seed: int, size: int) -> tuple[Any, ...]:
    """X and a global scale."""
    g = generator(seed)
    return activations(g, size), torch.rand((), device="cuda", generator=g) * 1e-3 + 1e-3


def quantised(seed: int, size: int) -> tuple[Any, ...]:
    """Codes, block scales and one global scale a row."""
    g = generator(seed)
    return *packed(g, size, HIDDEN), torch.rand(size, 1, device="cuda", generator=g)


def logits(seed: int, size: int) -> tuple[Any, ...]:
    """Router logits over 64 experts and a bias."""
    g = generator(seed)
    return torch.randn(size, 64, device="cuda", generator=g), torch.randn(64, device="cuda", generator=g)


def dense(seed: int, size: int) -> tuple[Any, ...]:
    """X and a dense weight with its scales."""
    g = generator(seed)
    scale, a_scale = torch.rand(2, device="cuda", generator=g) * 1e-3 + 1e-3
    return activations(g, size), *packed(g, 384, HIDDEN), scale[None], a_scale[None]


def linear(x, codes, scales, global_scale, a_scale, *, precision):
    """A dense layer; the activation scale goes in only where it is used."""
    a_scale = a_scale if precision == "w4a4_static" else None
    return torch.ops.nvfp4.linear(x, codes, scales, global_scale, a_scale, precision=precision)


def dequantize(codes, scales, global_scale):
    """To bfloat16."""
    return torch.ops.nvfp4.dequantize(codes, scales, global_scale, torch.bfloat16)


def cases() -> Iterator[Case]:
    """Every case; each is judged in eager mode, and most under reduce-overhead too."""

    def both(name: str, fn: Callable, make: Callable, **options: Any) -> Iterator[Case]:
        yield Case(name, make, fn=fn, sizes=SIZES, **options)
        sizes = SIZES[1:]
        yield Case(f"{name}-compiled", make, fn=fn, sizes=sizes, mode="compiled", **options)

    yield from both("quantize", torch.ops.nvfp4.quantize, with_scale)
    yield from both("quantize-per-token", torch.ops.nvfp4.quantize_per_token, one_tensor)
    yield from both("dequantize", dequantize, quantised)
    yield from both("probe", probed, one_tensor)
    for scoring in ("softmax", "sigmoid", "sqrt_softplus"):
        fn = partial(torch.ops.nvfp4.route, top_k=6, scoring=scoring)
        yield from both(f"route-{scoring}", fn, logits)
    for precision in PRECISIONS:
        yield from both(f"linear-{precision}", partial(linear, precision=precision), dense)
        static = precision == "w4a4_static"
        make = layer_with_scales if static else layer
        for form, options, parts in (
            ("silu", {}, 2),
            ("swigluoai", SWIGLUOAI, 2),
            ("relu2", {"activation": "relu2"}, 1),
        ):
            fn = partial(moe, precision=precision, **options)
            yield from both(f"moe-{precision}-{form}", fn, partial(make, parts=parts), routing=ROUTING)
    yield from both("moe-health", moe_with_health, layer, routing=ROUTING)
    yield from both("two-layers", run_two_layers, two_layers, routing=ROUTING)
    yield from both("routed-block", routed_block, block_inputs)
