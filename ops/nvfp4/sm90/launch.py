"""One layer on sm_90a: sort, GEMM and activation, GEMM and router weight, sum."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from . import compile as build
from . import tiles

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


@dataclass(frozen=True)
class Shape:
    """What a launch depends on, apart from addresses.

    Attributes:
        slots, top_k, experts, hidden: as they are; inter: padded to 64. num_ids: global experts.
        gated, kind, limited: the activation. mode: how activations are scaled (see kernels.moe.row_scale), for each
        GEMM. wide_ids, wide_map: int64. counted: with health.
    """

    slots: int
    top_k: int
    experts: int
    hidden: int
    inter: int
    num_ids: int
    gated: bool
    kind: int
    limited: bool
    mode: tuple[str, str]
    wide_ids: bool
    wide_map: bool
    counted: bool

    @property
    def tile(self) -> build.Tile:
        """The tile of both GEMMs: the routed rows are cut once."""
        return tiles.choose(self.slots, self.experts, self.hidden, self.inter)

    @property
    def kernels(self) -> tuple[build.Gemm | build.Around, ...]:
        """Every kernel of the layer, in order."""
        few = self.tile.split and self.slots <= tiles.FEW and not self.counted
        first = build.Gemm(self.tile, True, self.gated, self.kind, self.limited, SCALES[self.mode[0]], few)
        second = build.Gemm(self.tile, False, False, 0, False, SCALES[self.mode[1]], few)
        sort = () if few else (build.Around("sort"),)
        cut = (build.Around("cut"),) if self.slots > MANY else ()
        return (*sort, *cut, first, second, build.Around("sum"))


class Plan:
    """The kernels of a shape, loaded, and the launch sizes."""

    def __init__(self, shape: Shape, device: int) -> None:
        tile = self.tile = shape.tile
        self.kernels = {k.name: build.kernel(k, device) for k in shape.kernels}
        # Tiles are at most a short one for each expert and the full ones; with as many rows as tiles, one each.
        self.most = min(shape.slots, shape.experts + shape.slots // tile.tokens)
        self.rows = -(-shape.slots // 4) * 4
        self.threads = 256 if shape.slots <= 1024 else 1024
        parts = 2 if shape.gated else 1
        self.blocks = (shape.inter * parts // 64, -(-shape.hidden // 64))
        self.row_tiles = tuple(-(-b * 64 // tile.rows) for b in self.blocks)
        room = torch.cuda.get_device_properties(device).multi_processor_count * tile.resident
        self.grids = tuple((min(room, self.most * r), 1) for r in self.row_tiles)


plan = functools.lru_cache(maxsize=1024)(Plan)


def _pointer(t: Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()


def run(
    out: Tensor,
    x: Tensor,
    ids: Tensor,
    router: Tensor,
    weights: tuple,
    expert_map: Tensor | None,
    shape: Shape,
    constants: tuple[float, float, float],
    quantize,
    health: int = 0,
) -> None:
    """Launch the layer into ``out`` on the current stream.

    Args:
        out: [tokens, H] bfloat16. x: the same, contiguous. ids, router: contiguous [tokens, k].
        weights: w13 and w2 (views of packed weights), their global scales, and float32 biases or None, in pairs.
        constants: alpha, beta, limit. quantize: called as quantize(x or h, 0 or 1) where a mode asks for it; returns
            rows and their scale. health: address of the first tokens-per-expert counter, or 0.
    """
    device = x.device.index
    p = plan(shape, device)
    stream = torch._C._cuda_getCurrentRawStream(device)
    (w13, w2), (g13, g2), (b13, b2) = weights
    meta = torch.empty(2 * p.rows + 4 * p.most + 4 + shape.experts, dtype=torch.int32, device=x.device)
    order = meta.data_ptr()
    by_expert = order + 4 * p.rows
    cuts = by_expert + 4 * p.rows
    num_tiles = cuts + 16 * p.most
    routed = (ids.data_ptr(), _pointer(expert_map))
    if "sort" in p.kernels:
        counts = num_tiles + 4 if "cut" in p.kernels else 0
        arguments = _Sort(*routed, router.data_ptr(), order, by_expert, counts, cuts, num_tiles, health, shape.slots,
                          shape.num_ids, shape.experts, p.tile.tokens, shape.wide_ids, shape.wide_map)  # fmt: skip
        p.kernels["sort"].launch((shape.experts, 1), p.threads, arguments, stream)
        if counts:
            p.kernels["cut"].launch((1, 1), 1024, arguments, stream)
    rows: Tensor = x
    for i, (w, g, b, k, width) in enumerate(
        ((w13, g13, b13, shape.hidden, shape.inter), (w2, g2, b2, shape.inter, shape.hidden))
    ):
        scale = None
        if shape.mode[i] != "none":
            rows, scale = quantize(rows, i)
        divisor = shape.slots // rows.shape[0]
        target = torch.empty((shape.slots, width), dtype=torch.bfloat16, device=x.device)
        arguments = _Gemm(w.data_ptr(), g.data_ptr(), _pointer(b), rows.data_ptr(), _pointer(scale), by_expert, order,
                          cuts, num_tiles, *routed, router.data_ptr(), target.data_ptr(), k, width, p.blocks[i],
                          p.row_tiles[i], divisor, shape.slots, shape.num_ids, shape.experts, shape.wide_ids,
                          shape.wide_map, *constants)  # fmt: skip
        p.kernels[f"gemm{i + 1}"].launch(p.grids[i], p.tile.warpgroups * 128 + p.tile.producers, arguments, stream)
        rows = target
    p.kernels["sum"].launch(
        (out.shape[0], -(-shape.hidden // 2048)), 256,
        _Sum(rows.data_ptr(), *routed, out.data_ptr(), shape.hidden, shape.top_k, shape.num_ids, shape.experts,
             shape.wide_ids, shape.wide_map), stream,
    )  # fmt: skip
