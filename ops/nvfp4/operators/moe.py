"""The mixture-of-experts layer: sort, two grouped GEMMs, activation and weighted sum behind one operator."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import native, reference, tiles
from ..format import ACTIVATIONS, is_gated
from ..health import COUNTERS
from ..kernels import health as health_kernels
from ..kernels import ids as id_kernels
from ..kernels import moe as kernels
from ..registry import as_bytes, register
from ..sm90 import launch as sm90
from ..sm90.layout import unpack
from .fake_quantize import fake_quantize, scale_mode
from .launch import on_device_of, power_of_two, require_warm
from .moe_check import check, check_health

_WEIGHTS = (
    "Tensor x, Tensor topk_ids, Tensor topk_weights, "
    "Tensor w13, Tensor w13_block_scale, Tensor w13_global_scale, "
    "Tensor w2, Tensor w2_block_scale, Tensor w2_global_scale, "
)
_OPTIONAL = ("Tensor? a13_scale", "Tensor? a2_scale", "Tensor? w13_bias", "Tensor? w2_bias", "Tensor? expert_map")
_CONSTANTS = (
    "str activation='silu', str precision='w4a16', str layout='checkpoint', "
    "float alpha=1.0, float beta=0.0, float? limit=None"
)
SCHEMA = f"moe({_WEIGHTS}{', '.join(o + '=None' for o in _OPTIONAL)}, *, {_CONSTANTS}) -> Tensor"
SCHEMA_HEALTH = f"moe.health({_WEIGHTS}{', '.join(_OPTIONAL)}, Tensor(a!) health, *, {_CONSTANTS}) -> Tensor"


def _fake(
    x, topk_ids, topk_weights, w13, w13_block_scale, w13_global_scale, w2, w2_block_scale, w2_global_scale,
    a13_scale=None, a2_scale=None, w13_bias=None, w2_bias=None, expert_map=None, *,
    activation="silu", precision="w4a16", layout="checkpoint", alpha=1.0, beta=0.0, limit=None,
):  # fmt: skip
    check(
        x, topk_ids, topk_weights, w13, w13_block_scale, w13_global_scale, w2, w2_block_scale, w2_global_scale,
        a13_scale, a2_scale, w13_bias, w2_bias, expert_map, activation, precision, layout, alpha, beta, limit,
    )  # fmt: skip
    return x.new_empty((x.shape[0], x.shape[1]))


def _cpu(*args, **constants) -> Tensor:
    out = _fake(*args, **constants)
    if constants.get("layout") == "sm90":
        args, constants = _unpacked(*args, **constants)
    kernel = native.library()
    if kernel is None:
        return reference.moe(*args, **constants)
    return native.moe(kernel, out, *args, **constants)


def _unpacked(x, ids, router, w13, s13, g13, w2, s2, *rest, **constants) -> tuple[tuple, dict]:
    """The same call in the layout of the checkpoint, for kernels that do not read the packed one."""
    gated, inter = is_gated(constants.get("activation", "silu")), w2.shape[2] * 64
    both = []
    for weight, rows, k, two in ((w13, inter, x.shape[1], gated), (w2, x.shape[1], inter, False)):
        experts = [unpack(packed, rows, k, two) for packed in weight]
        both.append([torch.stack(part) for part in zip(*experts, strict=True)])
    (w13, s13), (w2, s2) = both
    return (x, ids, router, w13, s13, g13, w2, s2, *rest), constants | {"layout": "checkpoint"}


def _cuda(*args, health=None, **constants) -> Tensor:
    out = _fake(*args, **constants)
    if out.numel():
        own = constants.get("layout") == "sm90" and out.dtype == torch.bfloat16 and out.is_cuda
        with on_device_of(out):
            (_launch_sm90 if own else _launch)(out, health, *args, **constants)
    return out


def _launch_sm90(
    out, health, x, topk_ids, topk_weights, w13, w13_block_scale, w13_global_scale, w2, w2_block_scale, w2_global_scale,
    a13_scale=None, a2_scale=None, w13_bias=None, w2_bias=None, expert_map=None, *,
    activation="silu", precision="w4a16", layout="sm90", alpha=1.0, beta=0.0, limit=None,
):  # fmt: skip
    experts = w2.shape[0]
    x, ids, router = x.contiguous(), topk_ids.contiguous(), topk_weights.contiguous()
    if x.data_ptr() % 16:
        x = x.clone()  # rows are fetched 16 bytes at a time
    num_ids = experts if expert_map is None else expert_map.numel()
    static = (a13_scale, a2_scale)
    modes = (scale_mode(precision, a13_scale), scale_mode(precision, a2_scale))
    layer = sm90.Layer(
        ids.numel(), ids.shape[1], experts, x.shape[1], w2.shape[2] * 64, num_ids, is_gated(activation),
        ACTIVATIONS[activation], limit, alpha, beta, modes, ids.dtype == torch.int64,
        expert_map is not None and expert_map.dtype == torch.int64, health is not None, x.device.index,
    )  # fmt: skip
    if precision != "w4a16" or health is not None:  # Triton kernels take part
        require_warm("moe", x, ids.dtype, *layer[1:])

    def quantize(rows: Tensor, i: int) -> tuple[Tensor, Tensor]:
        count = layer.slots if i or modes[i] == "expert" else rows.shape[0]
        return fake_quantize(rows, count, ids, expert_map, static[i], modes[i], num_ids, experts)

    counters = 0 if health is None else health.data_ptr() + 8 * COUNTERS
    weights = ((w13, w13_global_scale, _float(w13_bias)), (w2, w2_global_scale, _float(w2_bias)))
    sm90.run(out, x, ids, router, weights, expert_map, layer, quantize, counters)
    _count_rows(health, x, out, ids, num_ids)


def _float(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.to(torch.float32)  # as finalize left it


def _count_rows(health, x, out, ids, num_ids) -> None:
    if health is None:
        return
    top_k, hidden = ids.shape[1], x.shape[1]
    block = min(power_of_two(hidden), 1024)
    health_kernels.count_rows[(x.shape[0],)](
        x, out, ids, health, hidden, num_ids, TOP_K=top_k, BLOCK=block, K_BLOCK=power_of_two(top_k, 1)
    )


def _launch(
    out, health, x, topk_ids, topk_weights, w13, w13_block_scale, w13_global_scale, w2, w2_block_scale, w2_global_scale,
    a13_scale=None, a2_scale=None, w13_bias=None, w2_bias=None, expert_map=None, *,
    activation="silu", precision="w4a16", layout="checkpoint", alpha=1.0, beta=0.0, limit=None,
):  # fmt: skip
    packed = layout == "sm90"
    experts, hidden, inter = w2.shape[0], x.shape[1], w2.shape[2] * (64 if packed else 2)
    top_k = topk_ids.shape[1]
    slots = topk_ids.numel()
    num_ids = experts if expert_map is None else expert_map.numel()
    x, ids, router = x.contiguous(), topk_ids.contiguous(), topk_weights.contiguous()
    tile1, tile2 = tiles.choose(slots, experts, hidden), tiles.choose(slots, experts, inter)
    require_warm(
        "moe", x, ids.dtype, top_k, experts, hidden, inter, num_ids, activation, precision, limit is None,
        None if a13_scale is None else a13_scale.numel(), None if a2_scale is None else a2_scale.numel(),
        None if w13_bias is None else w13_bias.dtype, None if w2_bias is None else w2_bias.dtype,
        None if expert_map is None else expert_map.dtype, health is None, packed, tile1.key(), tile2.key(),
    )  # fmt: skip
    starts = ids.new_empty(experts + 1, dtype=torch.int32)
    order = ids.new_empty(slots, dtype=torch.int32)
    id_kernels.sort_slots[(experts,)](
        ids, expert_map, starts, order, health, slots, num_ids, experts,
        TOKENS_FIELD=COUNTERS, BLOCK=min(power_of_two(slots), 1024), num_warps=4,
    )  # fmt: skip
    rows, scale, mode, divisor = x, None, scale_mode(precision, a13_scale), top_k
    if precision != "w4a16":
        divisor = 1 if mode == "expert" else top_k
        rows, scale = fake_quantize(x, slots // divisor, ids, expert_map, a13_scale, mode, num_ids, experts)
    h = x.new_empty((slots, inter))
    grid_m = min(slots, (slots + experts * (tile1.m - 1)) // tile1.m)
    e_block = power_of_two(experts, 2)
    kernels.gemm1[(-(-inter // tile1.n), grid_m)](
        rows, scale, order, starts, w13, w13_block_scale, w13_global_scale, w13_bias, h,
        hidden, inter, experts, divisor, alpha, beta, 0.0 if limit is None else limit,
        SCALE=mode, GATED=is_gated(activation), KIND=ACTIVATIONS[activation], LIMITED=limit is not None,
        BLOCK_M=tile1.m, BLOCK_N=tile1.n, BLOCK_K=tile1.k, EVEN_K=hidden % tile1.k == 0, E_BLOCK=e_block, PACKED=packed,
        num_warps=tile1.warps, num_stages=tile1.stages,
    )  # fmt: skip
    scale, mode = None, scale_mode(precision, a2_scale)
    if precision != "w4a16":
        h, scale = fake_quantize(h, slots, ids, expert_map, a2_scale, mode, num_ids, experts)
    partial = x.new_empty((slots, hidden), dtype=torch.float32)
    grid_m = min(slots, (slots + experts * (tile2.m - 1)) // tile2.m)
    kernels.gemm2[(-(-hidden // tile2.n), grid_m)](
        h, scale, router, order, starts, w2, w2_block_scale, w2_global_scale, w2_bias, partial,
        inter, hidden, experts, SCALE=mode,
        BLOCK_M=tile2.m, BLOCK_N=tile2.n, BLOCK_K=tile2.k, EVEN_K=inter % tile2.k == 0, E_BLOCK=e_block, PACKED=packed,
        num_warps=tile2.warps, num_stages=tile2.stages,
    )  # fmt: skip
    block = min(power_of_two(hidden), 1024)
    kernels.sum_slots[(x.shape[0], -(-hidden // block))](
        partial, ids, expert_map, out, hidden, num_ids, experts, TOP_K=top_k, BLOCK=block, num_warps=4
    )
    _count_rows(health, x, out, ids, num_ids)


def _fake_health(*args, **constants) -> Tensor:
    *inputs, health = args
    out = _fake(*inputs, **constants)
    check_health(health, inputs[0], inputs[6].shape[0])
    return out


def _cpu_health(*args, **constants) -> Tensor:
    *inputs, health = args
    check_health(health, inputs[0], inputs[6].shape[0])
    out = _cpu(*inputs, **constants)
    reference.count_health(inputs[0], out, inputs[1], inputs[13], inputs[6].shape[0], health)
    return out


def _cuda_health(*args, **constants) -> Tensor:
    *inputs, health = args
    check_health(health, inputs[0], inputs[6].shape[0])
    return _cuda(*inputs, health=health, **constants)


register(SCHEMA, cpu=_cpu, cuda=_cuda, fake=_fake)
register(SCHEMA_HEALTH, cpu=_cpu_health, cuda=_cuda_health, fake=_fake_health)


def moe(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, *weights: Tensor | None, **constants) -> Tensor:
    """Sum over k of p_k act(x W1^T, x W3^T) W2^T, the experts in NVFP4.

    The same arguments as ``torch.ops.nvfp4.moe``; block scales may be float8_e4m3fn. ``ExpertWeights`` holds them
    validated, and calls the operator.

    Args:
        x: [tokens, H] bfloat16, float16 or float32.
        topk_ids: int32 or int64 [tokens, k], global ids; -1 and ids out of range contribute zero, duplicates add up.
        topk_weights: float32 [tokens, k].
        weights: w13 uint8 [E, 2I, H/2] (rows gate, then up; [E, I, H/2] without a gate), w13_block_scale [E, 2I, H/16],
            w13_global_scale float32 [E, 2], w2 [E, H, I/2], w2_block_scale [E, H, I/16], w2_global_scale [E]; then
            optional a13_scale and a2_scale (float32 [1] or [E], for w4a4_static), w13_bias [E, 2I], w2_bias [E, H],
            expert_map (global to local ids, -1 elsewhere). In layout "sm90" w13 and w2 are what ``nvfp4.finalize``
            packed, uint8 [E, blocks, steps, 2304], their block scales are empty, and w13_bias is as wide as the packed
            features.
        constants: activation ("silu", "swigluoai", "swiglustep", "gelu", "gelu_tanh", "relu2"), precision ("w4a16",
            "w4a4_static", "w4a4_per_token"), layout, alpha and beta (swigluoai), limit (clamped forms).

    Returns:
        [tokens, H] in x's dtype. The intermediate is rounded to x's dtype, and in layout "sm90" each expert's share of
        a token too; everything else accumulates in float32.

    Raises:
        ShapeError, GradError, CaptureError.
    """
    tensors = [None if w is None else as_bytes(w) for w in weights]
    return torch.ops.nvfp4.moe(x, topk_ids, topk_weights, *tensors, **constants)
