"""Callables that nobody here wrote: two forms of the experts of transformers, and attention of torch.

What is expected, and why:

* ``grouped-mm-experts``: PROVEN. It counts tokens with histc over a given range, and grouped_mm reads the offsets on
  the device. (It is an operator of torch: transformers' own fallback for other dtypes reads the offsets on the host.)
* ``batched-mm-experts``: PROVEN. It gathers one weight matrix a slot, so every shape follows from the inputs.
* ``eager-experts``: REFUTED, data-dependent shape. It asks which experts were hit (nonzero), and loops over them.
* ``growing-mask``: REFUTED, baked host state. Attention itself is sound; the length of its mask is a Python number
  that grows with each call, and a graph keeps the number that it was captured with.
* ``fixed-mask``: PROVEN. The same attention with the length in a tensor that is an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from graph_tests.case import Case, Routing

HIDDEN, INTER, EXPERTS, TOP_K, TOKENS = 256, 128, 8, 2, 64
HEADS, HEAD_SIZE, LENGTH = 4, 64, 128
ROUTING = Routing(ids=1, num_experts=EXPERTS, rows=0)


def generator(seed: int) -> torch.Generator:
    """Seeded, on the GPU."""
    return torch.Generator(device="cuda").manual_seed(seed)


def routed(seed: int) -> tuple[torch.Tensor, ...]:
    """Hidden states, expert ids and their weights."""
    g = generator(seed)
    x = torch.randn(TOKENS, HIDDEN, device="cuda", generator=g).bfloat16()
    weights, ids = torch.randn(TOKENS, EXPERTS, device="cuda", generator=g).softmax(-1).topk(TOP_K, dim=-1)
    return x, ids, weights.bfloat16()


def build_experts(form: str) -> Callable[..., torch.Tensor]:
    """Qwen3MoeExperts with random weights, in one of the forms that transformers offers."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(
        hidden_size=HIDDEN, moe_intermediate_size=INTER, num_experts=EXPERTS, num_experts_per_tok=TOP_K
    )
    config._experts_implementation = form
    experts = Qwen3MoeExperts(config)
    with torch.no_grad():
        for weight in experts.parameters():
            weight.normal_(std=0.05, generator=torch.Generator().manual_seed(weight.shape[1]))
    return experts.to("cuda" if torch.cuda.is_available() else "cpu", torch.bfloat16)


def states(seed: int) -> tuple[torch.Tensor, ...]:
    """Query, key and value [1, heads, length, size]."""
    g = generator(seed)
    shape = (1, HEADS, LENGTH, HEAD_SIZE)
    return tuple(torch.randn(shape, device="cuda", generator=g).bfloat16() for _ in range(3))


def states_and_length(seed: int) -> tuple[torch.Tensor, ...]:
    """The same, and how many positions are filled."""
    return *states(seed), torch.full((), 1 + seed, device="cuda")


class GrowingMask:
    """One more position may be seen in each call, and the host counts them."""

    def __init__(self) -> None:
        self.length = 0

    def __call__(self, query, key, value):
        """Attention over what may be seen so far."""
        self.length += 1
        seen = torch.arange(LENGTH, device=query.device) < self.length  #
        return F.scaled_dot_product_attention(query, key, value, attn_mask=seen[None, :].expand(LENGTH, -1))


def fixed_mask(query, key, value, length):
    """The mask follows a tensor."""
    seen = torch.arange(LENGTH, device=query.device) < length
    return F.scaled_dot_product_attention(query, key, value, attn_mask=seen[None, :].expand(LENGTH, -1))


def cases() -> Iterator[Case]:
    """Eager and, where the callable compiles in one piece, under reduce-overhead."""

    def experts(form: str, mode: str = "eager", **options: Any) -> Case:
        name = f"{form.replace('_', '-')}-experts" + ("-compiled" if mode == "compiled" else "")
        return Case(name, routed, build=partial(build_experts, form), routing=ROUTING, mode=mode, **options)

    for form in ("grouped_mm", "batched_mm"):
        yield experts(form)
        yield experts(form, "compiled")
    yield experts("eager")
    yield Case("growing-mask", states, build=GrowingMask)
    yield Case("fixed-mask", states_and_length, fn=fixed_mask)
