"""All experts of one projection from checkpoint layout to kernel layout, in place where the memory allows it."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from . import compile as build
from .driver import Launch
from .layout import BLOCK, CODE_BYTES, SCALE_BYTES, blocks_of, pack, steps_of

BYTES = CODE_BYTES + SCALE_BYTES


class _Pack(ctypes.Structure):
    _fields_ = [
        *((n, ctypes.c_void_p) for n in ("codes", "scales", "out")),
        *((n, ctypes.c_int) for n in ("rows", "K", "gated")),
    ]


def packed_shape(rows: int, k: int, gated: bool) -> tuple[int, int, int]:
    """[blocks, steps, bytes] of one expert's weight [N, K]; ``rows`` counts gate and up, if gated."""
    return blocks_of(rows // 2 if gated else rows, gated), steps_of(k), BYTES


def storage(experts: int, rows: int, k: int, gated: bool, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Memory that holds codes and scales of the checkpoint now and the packed weight after ``pack_experts``.

    Returns:
        The storage uint8 [E, bytes], and its views: codes [E, N, K/2] and block scales [E, N, K/16].
    """
    blocks, steps, size = packed_shape(rows, k, gated)
    store = torch.empty(experts, blocks * steps * size, dtype=torch.uint8, device=device)
    codes, scales = rows * k // 2, rows * k // 16
    return (
        store,
        store[:, :codes].unflatten(1, (rows, k // 2)),
        store[:, codes : codes + scales].unflatten(1, (rows, k // 16)),
    )


def pack_experts(codes: Tensor, block_scale: Tensor, gated: bool, store: Tensor | None = None) -> Tensor:
    """One expert at a time, through a buffer of one packed expert.

    Args:
        codes: uint8 [E, N, K/2]. block_scale: uint8 [E, N, K/16]. store: what ``storage`` returned with these views;
            it is overwritten. Without one, new memory is taken.

    Returns:
        uint8 [E, blocks, steps, 2304].
    """
    experts, rows, k = codes.shape[0], codes.shape[1], codes.shape[2] * 2
    shape = packed_shape(rows, k, gated)
    if store is None:
        store = torch.empty(experts, shape[0] * shape[1] * BYTES, dtype=torch.uint8, device=codes.device)
    out = store.view(experts, *shape)
    if codes.device.type != "cuda":
        for e in range(experts):
            out[e] = pack(codes[e], block_scale[e], gated)
        return out
    with torch.cuda.device(codes.device):
        arguments = _Pack(None, None, None, rows, k, int(gated))
        launch = Launch(build.load(build.Around("pack"), codes.device.index), 128, 0, arguments)
        stream = torch.cuda.current_stream().cuda_stream
        one = torch.empty(shape, dtype=torch.uint8, device=codes.device)
        for e in range(experts):
            arguments.codes, arguments.scales, arguments.out = (
                codes[e].data_ptr(),
                block_scale[e].data_ptr(),
                one.data_ptr(),
            )
            launch((shape[1], shape[0]), stream)
            out[e].copy_(one)
    return out


def arguments(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and block scales as the operator takes them in this layout: the whole weight, and an empty tensor."""
    return packed, packed.new_empty((packed.shape[0], 0))


def padded(size: int) -> int:
    """Features as the kernels count them."""
    return steps_of(size) * BLOCK
