"""What ``torch.ops.nvfp4.moe`` takes. Messages are made only where they are needed: this runs on every eager call."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import ShapeError
from ..format import ACTIVATIONS, PRECISIONS, is_gated
from ..health import COUNTERS
from ..registry import need, need_activation_dtype, need_same_device, refuse_grad
from ..sm90 import packing

LIMITED = ("silu", "swigluoai", "swiglustep")
_ID_TYPES = (torch.int32, torch.int64)


def check(
    x, topk_ids, topk_weights, w13, w13_block_scale, w13_global_scale, w2, w2_block_scale, w2_global_scale,
    a13_scale, a2_scale, w13_bias, w2_bias, expert_map, activation, precision, layout, alpha, beta, limit,
):  # fmt: skip
    """Raise ShapeError or GradError unless these are the operator's arguments."""
    refuse_grad("moe", x, topk_weights, w13_global_scale, w2_global_scale, w13_bias, w2_bias)
    need_activation_dtype("moe", x)
    need_same_device(
        "moe", x, topk_ids=topk_ids, topk_weights=topk_weights, w13=w13, w13_block_scale=w13_block_scale,
        w13_global_scale=w13_global_scale, w2=w2, w2_block_scale=w2_block_scale, w2_global_scale=w2_global_scale,
        a13_scale=a13_scale, a2_scale=a2_scale, w13_bias=w13_bias, w2_bias=w2_bias, expert_map=expert_map,
    )  # fmt: skip
    _check_constants(activation, precision, layout, alpha, beta, limit)
    _check_routing(x, topk_ids, topk_weights, expert_map)
    parts = 2 if is_gated(activation) else 1
    if layout == "sm90":
        experts, hidden, inter = w2.shape[0], x.shape[1], w2.shape[2] * 64 if w2.dim() == 4 else 0
        _check_packed("w13", w13, w13_block_scale, (experts, *packing.packed_shape(inter * parts, hidden, parts == 2)))
        _check_packed("w2", w2, w2_block_scale, (experts, *packing.packed_shape(hidden, inter, False)))
    else:
        experts, hidden, half = w2.shape if w2.dim() == 3 else (0, 0, 0)
        inter = half * 2
        _check_weight("w13", w13, w13_block_scale, (experts, inter * parts, hidden))
        _check_weight("w2", w2, w2_block_scale, (experts, hidden, inter))
        if x.shape[1] != hidden:
            raise ShapeError(f"nvfp4::moe: x has {x.shape[1]} columns; w2 gives hidden size {hidden}")
    if not (w13_global_scale.shape == (experts, parts) and w2_global_scale.shape == (experts,)):
        raise ShapeError(
            f"nvfp4::moe: global scales are {tuple(w13_global_scale.shape)} and {tuple(w2_global_scale.shape)}; "
            f"need [{experts}, {parts}] (gate, up) and [{experts}]"
        )
    if not (w13_global_scale.dtype == w2_global_scale.dtype == torch.float32):
        raise ShapeError("nvfp4::moe: global scales must be float32")
    for name, scale in (("a13_scale", a13_scale), ("a2_scale", a2_scale)):
        if precision == "w4a4_static" and (
            scale is None or scale.dtype != torch.float32 or scale.shape not in ((1,), (experts,))
        ):
            raise ShapeError(
                f"nvfp4::moe: w4a4_static needs {name} as float32 [1] or [{experts}]; use w4a4_per_token where there "
                "is none"
            )
    _check_dense(
        w13_global_scale=w13_global_scale, w2_global_scale=w2_global_scale, a13_scale=a13_scale, a2_scale=a2_scale,
        w13_bias=w13_bias, w2_bias=w2_bias, expert_map=expert_map,
    )  # fmt: skip
    for name, bias, shape in (
        ("w13_bias", w13_bias, (experts, inter * parts)),
        ("w2_bias", w2_bias, (experts, hidden)),
    ):
        if not (bias is None or bias.shape == shape):
            raise ShapeError(f"nvfp4::moe: {name} must be {list(shape)}")


def _check_dense(**tensors: Tensor | None) -> None:
    for name, t in tensors.items():
        if t is not None and not t.is_contiguous():
            raise ShapeError(f"nvfp4::moe: {name} has strides {t.stride()}; the kernels need it contiguous")


def _check_constants(activation, precision, layout, alpha, beta, limit) -> None:
    if activation not in ACTIVATIONS:
        raise ShapeError(f"nvfp4::moe: activation is {activation!r}; known are {', '.join(ACTIVATIONS)}")
    if precision not in PRECISIONS:
        raise ShapeError(f"nvfp4::moe: precision is {precision!r}; known are {', '.join(PRECISIONS)}")
    if layout not in ("checkpoint", "sm90"):
        raise ShapeError(f"nvfp4::moe: layout is {layout!r}; known are 'checkpoint' and 'sm90'")
    if not (activation == "swigluoai" or (alpha == 1.0 and beta == 0.0)):
        raise ShapeError(
            f"nvfp4::moe: alpha {alpha} and beta {beta} belong to swigluoai; {activation} would ignore them"
        )
    if not (limit is None or activation in LIMITED):
        raise ShapeError(f"nvfp4::moe: limit {limit} has no meaning for {activation}; leave it out")


def _check_routing(x, topk_ids, topk_weights, expert_map) -> None:
    if not (x.dim() == 2):
        raise ShapeError(f"nvfp4::moe: x has shape {tuple(x.shape)}; need [tokens, hidden]")
    if not (topk_ids.dim() == 2 and topk_ids.shape == topk_weights.shape and topk_ids.shape[0] == x.shape[0]):
        raise ShapeError(
            f"nvfp4::moe: topk_ids {tuple(topk_ids.shape)} and topk_weights {tuple(topk_weights.shape)} must both be "
            f"[{x.shape[0]}, top_k]"
        )
    if topk_ids.dtype not in _ID_TYPES:
        raise ShapeError(f"nvfp4::moe: topk_ids are {topk_ids.dtype}; need int32 or int64, convert them")
    if not (topk_weights.dtype == torch.float32):
        raise ShapeError(f"nvfp4::moe: topk_weights are {topk_weights.dtype}; router weights stay float32")
    if not (expert_map is None or (expert_map.dim() == 1 and expert_map.dtype in _ID_TYPES)):
        raise ShapeError(
            "nvfp4::moe: expert_map must be int32 or int64 [global experts], local ids, -1 for experts elsewhere"
        )


def _check_weight(name: str, codes: Tensor, block_scale: Tensor, shape: tuple[int, int, int]) -> None:
    experts, n, k = shape
    if not (
        codes.dtype == block_scale.dtype == torch.uint8
        and codes.shape == (experts, n, k // 2)
        and block_scale.shape == (experts, n, k // 16)
        and k % 16 == 0
        and codes.is_contiguous()
        and block_scale.is_contiguous()
    ):
        raise ShapeError(
            f"nvfp4::moe: {name} is {codes.dtype} {tuple(codes.shape)} with block scales {block_scale.dtype} "
            f"{tuple(block_scale.shape)}; need contiguous uint8 [{experts}, {n}, {k}/2] and [{experts}, {n}, {k}/16]"
        )


def _check_packed(name: str, codes: Tensor, block_scale: Tensor, shape: tuple[int, ...]) -> None:
    if not (
        codes.dtype == block_scale.dtype == torch.uint8
        and codes.shape == shape
        and codes.is_contiguous()
        and block_scale.shape == (shape[0], 0)
    ):
        raise ShapeError(
            f"nvfp4::moe: {name} {codes.dtype} {tuple(codes.shape)} with block scales {tuple(block_scale.shape)} is "
            f"not what layout 'sm90' means: contiguous uint8 {list(shape)} with the scales inside, and [{shape[0]}, 0];"
            " take both from nvfp4.finalize"
        )


def check_health(health: Tensor, x: Tensor, experts: int) -> None:
    """Raise ShapeError unless this is a row that ``nvfp4.health.buffer`` made."""
    need_same_device("moe.health", x, health=health)
    need(
        health.dtype == torch.int64 and health.shape == (COUNTERS + experts,) and health.is_contiguous(),
        "moe.health",
        f"health is {health.dtype} {tuple(health.shape)}; need a contiguous int64 [{COUNTERS + experts}] row, "
        "as nvfp4.health.buffer makes",
    )
