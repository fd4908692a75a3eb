"""One layer on sm_90a: sort, GEMM and activation, GEMM and router weight, sum."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from . import compile as build
from . import tiles
from .driver import Launch

_P, _I, _F = ctypes.c_void_p, ctypes.c_int, ctypes.c_float
MANY = 8192
"""Slots from which the tiles are made by a kernel of their own."""
SCALES = {"none": 0, "shared": 1, "expert": 2, "token": 3}


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


class Layer(NamedTuple):
    """What a launch depends on, apart from addresses.

    Attributes:
        slots, top_k, experts, hidden: as they are; inter: padded to 64. num_ids: global experts.
        gated, kind, limit, alpha, beta: the activation. mode: how activations are scaled (see kernels.moe.row_scale),
        for each GEMM. wide_ids, wide_map: int64. counted: with health. device: index.
    """

    slots: int
    top_k: int
    experts: int
    hidden: int
    inter: int
    num_ids: int
    gated: bool
    kind: int
    limit: float | None
    alpha: float
    beta: float
    mode: tuple[str, str]
    wide_ids: bool
    wide_map: bool
    counted: bool
    device: int


class Plan:
    """The kernels of a layer, loaded, with what does not change between calls; each thread has its own.

    Raises:
        CaptureError: a kernel would have to be built inside a capture.
    """

    def __init__(self, layer: Layer, thread: int) -> None:
        tile = tiles.choose(layer.slots, layer.experts, layer.hidden, layer.inter)
        few = tile.split and layer.slots <= tiles.FEW and not layer.counted
        # Tiles are the full ones and at most a short one for each expert; never more than rows.
        self.most = min(layer.slots, layer.experts + layer.slots // tile.tokens)
        self.rows = -(-layer.slots // 4) * 4
        words = 2 * self.rows + 4 * self.most + 4 + layer.experts
        self.h_at = -(-4 * words // 256) * 256
        self.partial_at = self.h_at + -(-2 * layer.slots * layer.inter // 256) * 256
        self.bytes = self.partial_at + 2 * layer.slots * layer.hidden
        room = torch.cuda.get_device_properties(layer.device).multi_processor_count * tile.resident
        routing = {"num_ids": layer.num_ids, "experts": layer.experts, "wide_ids": layer.wide_ids,
                   "wide_map": layer.wide_map}  # fmt: skip

        def kernel(spec: build.Gemm | build.Around, threads: int, arguments: ctypes.Structure) -> Launch:
            return Launch(build.load(spec, layer.device), threads, spec.smem, arguments)

        sort = _Sort(slots=layer.slots, tile=tile.tokens, **routing)
        threads = 256 if layer.slots <= 1024 else 1024
        self.sort = None if few else kernel(build.Around("sort"), threads, sort)
        self.cut = kernel(build.Around("cut"), 1024, sort) if layer.slots > MANY else None
        self.gemms, self.grids = [], []
        parts = 2 if layer.gated else 1
        for first in (True, False):
            k, width = (layer.hidden, layer.inter) if first else (layer.inter, layer.hidden)
            blocks = layer.inter * parts // 64 if first else -(-layer.hidden // 64)
            row_tiles = -(-blocks * 64 // tile.rows)
            scale = SCALES[layer.mode[0 if first else 1]]
            spec = build.Gemm(tile, first, layer.gated, layer.kind if first else 0, first and layer.limit is not None,
                              scale, few)  # fmt: skip
            # One row of x for each token, unless each expert quantised its own.
            divisor = layer.top_k if first and layer.mode[0] != "expert" else 1
            arguments = _Gemm(K=k, width=width, blocks=blocks, row_tiles=row_tiles, divisor=divisor, slots=layer.slots,
                              alpha=layer.alpha, beta=layer.beta, limit=layer.limit or 0.0, **routing)  # fmt: skip
            self.gemms.append(kernel(spec, tile.threads, arguments))
            self.grids.append((min(room, self.most * row_tiles), 1))
        self.sum = kernel(build.Around("sum"), 256, _Sum(width=layer.hidden, top_k=layer.top_k, **routing))


plan = functools.lru_cache(maxsize=4096)(Plan)


def run(out: Tensor, x: Tensor, ids: Tensor, router: Tensor, weights: tuple, expert_map: Tensor | None, layer: Layer,
        quantize: Callable[[Tensor, int], tuple[Tensor, Tensor]], health: int = 0) -> None:  # fmt: skip
    """Launch the layer into ``out`` on the current stream.

    Args:
        out: [tokens, H] bfloat16. x: the same, contiguous, from a multiple of 16 bytes. ids, router: contiguous
            [tokens, k]. weights: for each GEMM, the packed weight, its global scales, and a float32 bias or None.
        quantize: called as quantize(x or h, 0 or 1) where the layer's mode asks for it; returns rows and their scale.
        health: address of the first tokens-per-expert counter, or 0.
    """
    p = plan(layer, threading.get_ident())
    stream = torch._C._cuda_getCurrentRawStream(layer.device)
    space = torch.empty(p.bytes, dtype=torch.uint8, device=x.device)
    order = space.data_ptr()
    by_expert = order + 4 * p.rows
    cuts = by_expert + 4 * p.rows
    num_tiles = cuts + 16 * p.most
    id_pointer, map_pointer, router_pointer = ids.data_ptr(), _pointer(expert_map), router.data_ptr()
    if p.sort is not None:
        a = p.sort.arguments
        a.ids, a.map, a.router, a.order, a.sorted = id_pointer, map_pointer, router_pointer, order, by_expert
        a.counts, a.tiles, a.num_tiles, a.health = num_tiles + 4 if p.cut else 0, cuts, num_tiles, health
        p.sort((layer.experts, 1), stream)
        if p.cut is not None:
            p.cut((1, 1), stream)
    rows, scale, targets = x.data_ptr(), None, (order + p.h_at, order + p.partial_at)
    for i, (weight, global_scale, bias) in enumerate(weights):
        if layer.mode[i] != "none":
            h = space[p.h_at : p.h_at + 2 * layer.slots * layer.inter].view(torch.bfloat16) if i else None
            quantized, scale = quantize(x if h is None else h.view(layer.slots, layer.inter), i)
            rows = quantized.data_ptr()
        a = p.gemms[i].arguments
        a.weights, a.global_scale, a.bias = weight.data_ptr(), global_scale.data_ptr(), _pointer(bias)
        a.x, a.row_scale, a.router, a.order, a.tiles = rows, _pointer(scale), by_expert, order, cuts
        a.num_tiles, a.ids, a.map, a.topk_weights = num_tiles, id_pointer, map_pointer, router_pointer
        a.out = rows = targets[i]
        p.gemms[i](p.grids[i], stream)
    a = p.sum.arguments
    a.partial, a.ids, a.map, a.out = rows, id_pointer, map_pointer, out.data_ptr()
    p.sum((out.shape[0], -(-layer.hidden // 2048)), stream)


def _pointer(t: Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()
