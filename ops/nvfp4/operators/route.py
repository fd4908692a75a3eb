"""Router logits to expert ids and weights."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import reference
from ..kernels.route import route_rows
from ..registry import need, need_activation_dtype, need_same_device, refuse_grad, register
from .launch import on_device_of, power_of_two, require_warm

SCHEMA = (
    "route(Tensor logits, Tensor? bias=None, *, int top_k, str scoring='softmax', bool renormalize=True, "
    "float scale=1.0) -> (Tensor topk_ids, Tensor topk_weights)"
)
SCORINGS = ("softmax", "sigmoid", "sqrt_softplus")


def _check(logits: Tensor, bias: Tensor | None, top_k: int, scoring: str) -> None:
    refuse_grad("route", logits, bias)
    need_activation_dtype("route", logits)
    need_same_device("route", logits, bias=bias)
    need(logits.dim() == 2, "route", f"logits have shape {tuple(logits.shape)}; need [tokens, experts]")
    experts = logits.shape[1]
    need(1 <= top_k <= experts, "route", f"top_k is {top_k} with {experts} experts; need 1 <= top_k <= experts")
    need(scoring in SCORINGS, "route", f"scoring is {scoring!r}; known are {', '.join(SCORINGS)}")
    need(bias is None or tuple(bias.shape) == (experts,), "route", f"bias must be [{experts}], one value an expert")


def _fake(logits, bias=None, *, top_k, scoring="softmax", renormalize=True, scale=1.0):
    _check(logits, bias, top_k, scoring)
    shape = (logits.shape[0], top_k)
    return logits.new_empty(shape, dtype=torch.int32), logits.new_empty(shape, dtype=torch.float32)


def _cpu(logits, bias=None, *, top_k, scoring="softmax", renormalize=True, scale=1.0):
    _check(logits, bias, top_k, scoring)
    return reference.route(logits, bias, top_k=top_k, scoring=scoring, renormalize=renormalize, scale=scale)


def _cuda(logits, bias=None, *, top_k, scoring="softmax", renormalize=True, scale=1.0):
    ids, weights = _fake(logits, bias, top_k=top_k, scoring=scoring, renormalize=renormalize, scale=scale)
    if logits.shape[0]:
        experts = logits.shape[1]
        logits = logits.contiguous()
        require_warm("route", logits, experts, top_k, scoring, renormalize, None if bias is None else bias.dtype)
        with on_device_of(logits):
            route_rows[(logits.shape[0],)](
                logits, bias, ids, weights, experts, experts, scale,
                TOP_K=top_k, SCORING=scoring, RENORMALIZE=renormalize,
                BLOCK=power_of_two(experts), K_BLOCK=power_of_two(top_k, 1), num_warps=1,
            )  # fmt: skip
    return ids, weights


register(SCHEMA, cpu=_cpu, cuda=_cuda, fake=_fake)


def route(
    logits: Tensor,
    bias: Tensor | None = None,
    *,
    top_k: int,
    scoring: str = "softmax",
    renormalize: bool = True,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Choose top_k experts a token.

    Softmax over all experts with ``renormalize`` equals softmax over the chosen logits only. Ties go to the lowest id.
    A row with NaN still gives distinct ids in range; its weights are NaN, so the fault stays visible.

    Args:
        logits: [tokens, experts]. bias: [experts], added for the selection only; weights come from unbiased scores.
        top_k: experts a token.
        scoring: "softmax", "sigmoid", or "sqrt_softplus".
        renormalize: divide the chosen weights by their sum (plus 1e-20 where scores can vanish together).
        scale: the routed scaling factor; apply it here or in the model, not in both.

    Returns:
        topk_ids int32 [tokens, top_k], topk_weights float32 [tokens, top_k].

    Raises:
        ShapeError, GradError.
    """
    return torch.ops.nvfp4.route(logits, bias, top_k=top_k, scoring=scoring, renormalize=renormalize, scale=scale)
