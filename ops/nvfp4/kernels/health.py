"""Instruments: what went through a layer, counted on the device."""

import triton
import triton.language as tl

from .codec import is_finite


@triton.jit
def count_rows(
    x_ptr, y_ptr, ids_ptr, health_ptr,
    H, num_ids,
    TOP_K: tl.constexpr, BLOCK: tl.constexpr, K_BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per token; fields in the order of nvfp4.health.Field. Integer atomics only: they commute."""
    row = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, K_BLOCK)
    ids = tl.load(ids_ptr + row * TOP_K + j, mask=j < TOP_K, other=-1).to(tl.int64)
    padding = tl.max((ids != -1).to(tl.int32), axis=0) == 0
    if padding:
        tl.atomic_add(health_ptr + 1, 1)
        return
    tl.atomic_add(health_ptr, 1)
    outside = tl.sum(((ids < -1) | (ids >= num_ids)).to(tl.int64), axis=0)
    if outside > 0:
        tl.atomic_add(health_ptr + 2, outside)
    bad_in, amax_in = inspect_row(x_ptr, row, H, BLOCK)
    bad_out, amax_out = inspect_row(y_ptr, row, H, BLOCK)
    if bad_in > 0:
        tl.atomic_add(health_ptr + 3, 1)
        tl.atomic_add(health_ptr + 4, bad_in)
    if bad_out > 0:
        tl.atomic_add(health_ptr + 5, 1)
        tl.atomic_add(health_ptr + 6, bad_out)
    tl.atomic_max(health_ptr + 7, amax_in.to(tl.int32, bitcast=True).to(tl.int64))
    tl.atomic_max(health_ptr + 8, amax_out.to(tl.int32, bitcast=True).to(tl.int64))


@triton.jit
def inspect_row(x_ptr, row, H, BLOCK: tl.constexpr):
    """Non-finite elements of a contiguous row, and the largest finite magnitude."""
    bad = tl.zeros((BLOCK,), tl.int64)
    amax = tl.zeros((BLOCK,), tl.float32)
    for base in range(0, H, BLOCK):
        k = base + tl.arange(0, BLOCK)
        v = tl.load(x_ptr + row * H + k, mask=k < H, other=0.0).to(tl.float32)
        fine = is_finite(v)
        bad += (fine == 0).to(tl.int64)
        amax = tl.maximum(amax, tl.where(fine, tl.abs(v), 0.0))
    return tl.sum(bad, axis=0), tl.max(amax, axis=0)


@triton.jit
def probe_rows(x_ptr, partial_ptr, K, BLOCK: tl.constexpr):
    """One program per row: amax, sum of squares, NaN, Inf and whether all zero, into partial [row, 5]."""
    row = tl.program_id(0).to(tl.int64)
    nan = tl.zeros((BLOCK,), tl.float32)
    inf = tl.zeros((BLOCK,), tl.float32)
    amax = tl.zeros((BLOCK,), tl.float32)
    squares = tl.zeros((BLOCK,), tl.float32)
    nonzero = tl.zeros((BLOCK,), tl.int32)
    for base in range(0, K, BLOCK):
        k = base + tl.arange(0, BLOCK)
        v = tl.load(x_ptr + row * K + k, mask=k < K, other=0.0).to(tl.float32)
        fine = is_finite(v)
        is_nan = v != v
        nan += is_nan.to(tl.float32)
        inf += ((fine == 0) & (is_nan == 0)).to(tl.float32)
        nonzero |= (v != 0.0).to(tl.int32)
        v = tl.where(fine, v, 0.0)
        amax = tl.maximum(amax, tl.abs(v))
        squares += v * v
    out = partial_ptr + row * 5
    tl.store(out, tl.max(amax, axis=0))
    tl.store(out + 1, tl.sum(squares, axis=0))
    tl.store(out + 2, tl.sum(nan, axis=0))
    tl.store(out + 3, tl.sum(inf, axis=0))
    tl.store(out + 4, (tl.max(nonzero, axis=0) == 0).to(tl.float32))


@triton.jit(do_not_specialize=["rows"])
def probe_total(partial_ptr, stats_ptr, rows, K, BLOCK: tl.constexpr):
    """One program: fold partial [rows, 5] into stats, in a fixed order. Fields as in nvfp4.health.ProbeField."""
    r = tl.arange(0, BLOCK)
    amax = tl.zeros((BLOCK,), tl.float32)
    squares = tl.zeros((BLOCK,), tl.float64)
    nan = tl.zeros((BLOCK,), tl.float64)
    inf = tl.zeros((BLOCK,), tl.float64)
    zero = tl.zeros((BLOCK,), tl.float64)
    for base in range(0, rows, BLOCK):
        live = base + r < rows
        p = partial_ptr + (base + r).to(tl.int64) * 5
        amax = tl.maximum(amax, tl.load(p, mask=live, other=0.0))
        squares += tl.load(p + 1, mask=live, other=0.0)
        nan += tl.load(p + 2, mask=live, other=0.0)
        inf += tl.load(p + 3, mask=live, other=0.0)
        zero += tl.load(p + 4, mask=live, other=0.0)
    tl.store(stats_ptr, tl.load(stats_ptr) + 1.0)
    tl.store(stats_ptr + 1, tl.load(stats_ptr + 1) + rows)
    tl.store(stats_ptr + 2, tl.load(stats_ptr + 2) + tl.full((), 1.0, tl.float64) * rows * K)
    tl.store(stats_ptr + 3, tl.maximum(tl.load(stats_ptr + 3), tl.max(amax, axis=0).to(tl.float64)))
    tl.store(stats_ptr + 4, tl.load(stats_ptr + 4) + tl.sum(squares, axis=0))
    tl.store(stats_ptr + 5, tl.load(stats_ptr + 5) + tl.sum(nan, axis=0))
    tl.store(stats_ptr + 6, tl.load(stats_ptr + 6) + tl.sum(inf, axis=0))
    tl.store(stats_ptr + 7, tl.load(stats_ptr + 7) + tl.sum(zero, axis=0))
