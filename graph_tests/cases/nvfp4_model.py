"""Conformance of the compiled model of the main job: the shipped checkpoint, from token ids to logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

import compiled_moe
from graph_tests.case import Case

SIZES = (1, 2, 16)


def tokens(seed: int, size: int) -> tuple[torch.Tensor]:
    """Ids of bytes [1, 8 * size]."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return (torch.randint(35, 120, (1, 8 * size), device="cuda", generator=generator),)


def build(precision: str) -> Callable:
    """The loaded model, without a cache: a function of its ids alone. Without a GPU its weights stand on the CPU."""
    model = compiled_moe.load(precision=precision, device="cuda" if torch.cuda.is_available() else "cpu")

    def forward(ids: torch.Tensor) -> torch.Tensor:
        # The mask is given: transformers 5.17 looks at the positions on the host before it makes one in eager mode.
        causal = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).tril()[None, None]
        return model(input_ids=ids, attention_mask=causal, use_cache=False).logits

    return forward


def cases() -> Iterator[Case]:
    """Eager and under reduce-overhead, weight-only and with quantised activations."""
    for precision in ("w4a16", "w4a4_per_token"):
        for mode in ("eager", "compiled"):
            yield Case(
                f"model-{precision}" + ("-compiled" if mode == "compiled" else ""), tokens,
                build=partial(build, precision), sizes=SIZES, mode=mode,
            )  # fmt: skip
