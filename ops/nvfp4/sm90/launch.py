"""One layer on sm_90a: sort, GEMM and activation, GEMM and router weight, sum."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ..format import ACTIVATIONS, is_gated
from . import compile as build
from .layout import blocks_of

_P, _I, _F = ctypes.c_void_p, ctypes.c_int, ctypes.c_float


class _Gemm(ctypes.Structure):
    _fields_ = [
        *((n, _P) for n in ("weights", "global_scale", "bias", "x", "row_scale", "router", "order", "tiles",
                            "num_tiles", "ids", "map", "topk_weights", "out")),
        *((n, _I) for n in ("K", "width", "blocks", "row_tiles", "divisor", "slots", "num_ids", "experts", "wide_ids",
                            "wide_map")),
        *((n, _F) for n in ("alpha", "beta", "limit")),
    ]  # fmt: skip


class _Sort(ctypes.Structure):
    _fields_ = [
        *((n, _P) for n in ("ids", "map", "router", "order", "sorted", "counts", "tiles", "num_tiles", "health")),
        *((n, _I) for n in ("slots", "num_ids", "experts", "tile", "wide_ids", "wide_map")),
    ]


class _Sum(ctypes.Structure):
    _fields_ = [
        *((n, _P) for n in ("partial", "ids", "map", "out")),
        *((n, _I) for n in ("width", "top_k", "num_ids", "experts", "wide_ids", "wide_map")),
    ]


SCALES = {"none": 0, "shared": 1, "expert": 2, "token": 3}


def _pointer(t: Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()


def run(out, x, ids, router, w13, g13, w2, g2, b13, b2, expert_map, inter, tile1, tile2, *,
        activation, alpha, beta, limit, processors):
    """w4a16 into out."""
    experts, hidden = g2.shape[0], out.shape[1]
    slots, top_k = ids.numel(), ids.shape[1]
    num_ids = experts if expert_map is None else expert_map.numel()
    gated = is_gated(activation)
    device = x.device.index
    stream = torch._C._cuda_getCurrentRawStream(device)
    most = min(slots, experts + slots // tile1.tokens)
    tiles_at = -(-slots // 4) * 4
    counting = slots > 8192  # many slots: experts count theirs, and another kernel makes the tiles
    meta = ids.new_empty(2 * tiles_at + 4 * most + 4 + experts, dtype=torch.int32)
    base = meta.data_ptr()
    order, num_tiles, tiles = base, base + 4 * (2 * tiles_at + 4 * most), base + 8 * tiles_at
    sorted_ = base + 4 * tiles_at
    counts = num_tiles + 4 if counting else 0
    wide, wide_map = int(ids.dtype == torch.int64), int(expert_map is not None and expert_map.dtype == torch.int64)
    sort = build.kernel(build.Around("sort"), device)
    threads = 256 if slots <= 1024 else 1024
    arguments = _Sort(ids.data_ptr(), _pointer(expert_map), router.data_ptr(), order, sorted_, counts, tiles, num_tiles, 0,
                      slots, num_ids, experts, tile1.tokens, wide, wide_map)
    few = slots <= 32 and tile1.split
    if not few:
        sort.launch((experts, 1), threads, arguments, stream)
    if counting:
        build.kernel(build.Around("cut"), device).launch((1, 1), 1024, arguments, stream)
    h = x.new_empty((slots, inter))
    for first in (True, False):
        tile = tile1 if first else tile2
        spec = build.Gemm(tile, first, gated, ACTIVATIONS[activation] if first else 0, first and limit is not None, 0, few)
        kernel = build.kernel(spec, device)
        if first:
            a = (w13, g13, b13, x, None)
            width, k, blocks = inter, hidden, blocks_of(inter, gated)
            target = h
        else:
            a = (w2, g2, b2, h, None)
            width, k, blocks = hidden, inter, blocks_of(hidden, False)
            target = x.new_empty((slots, hidden))
        row_tiles = -(-blocks * 64 // tile.rows)
        grid = min(processors * tile.resident, most * row_tiles)
        kernel.launch((grid, 1), tile.warpgroups * 128 + tile.producers, _Gemm(
            *map(_pointer, a), sorted_, order, tiles, num_tiles, ids.data_ptr(), _pointer(expert_map), router.data_ptr(),
            target.data_ptr(), k, width, blocks, row_tiles, top_k if first else 1, slots, num_ids, experts, wide, wide_map, alpha, beta, 0.0 if limit is None else limit), stream)
    total = build.kernel(build.Around("sum"), device)
    total.launch((x.shape[0], -(-hidden // 2048)), 256, _Sum(target.data_ptr(), ids.data_ptr(), _pointer(expert_map),
                 out.data_ptr(), hidden, top_k, num_ids, experts, wide, wide_map), stream)
    return out
