"""Quantise and dequantise rows."""

import triton
import triton.language as tl

from .codec import decode_tile, global_scale_of, is_finite, quantize_blocks
from .ids import local_expert


@triton.jit
def quantize_rows(
    x_ptr, scale_ptr, codes_ptr, bytes_ptr, token_scale_ptr,
    K,
    PER_TOKEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per row: codes [rows, K/2], scale bytes [rows, K/16] and, per token, its global scale."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * K + k, mask=k < K, other=0.0).to(tl.float32)
    if PER_TOKEN:
        g = global_scale_of(tl.max(tl.where(is_finite(x), tl.abs(x), 0.0), axis=0))
        tl.store(token_scale_ptr + row, g)
    else:
        g = tl.load(scale_ptr)
    codes, scale = quantize_blocks(tl.reshape(x, (BLOCK // 16, 16)), g)
    lo, hi = tl.split(tl.reshape(codes, (BLOCK // 2, 2)))
    half = tl.arange(0, BLOCK // 2)
    tl.store(codes_ptr + row * (K // 2) + half, (lo | (hi << 4)).to(tl.uint8), mask=half < K // 2)
    block = tl.arange(0, BLOCK // 16)
    tl.store(bytes_ptr + row * (K // 16) + block, scale.to(tl.uint8), mask=block < K // 16)


@triton.jit
def fake_quantize_rows(
    x_ptr, ids_ptr, map_ptr, scale_ptr, out_ptr, row_scale_ptr,
    K, slots_per_row, num_ids, E,
    SCALE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per output row: e2m1 * e4m3 values of x in x's dtype (exact), without the global scale.

    SCALE: "token" makes one scale a row and stores it; "shared" reads scale[0]; "expert" reads the scale of the
    expert that this routed slot goes to (slots without an expert are left unwritten).
    """
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    expert = 0
    if SCALE == "expert":
        expert = local_expert(tl.load(ids_ptr + row), map_ptr, num_ids, E)
    x = tl.load(x_ptr + (row // slots_per_row) * K + k, mask=k < K, other=0.0).to(tl.float32)
    if SCALE == "token":
        g = global_scale_of(tl.max(tl.where(is_finite(x), tl.abs(x), 0.0), axis=0))
        tl.store(row_scale_ptr + row, g)
    else:
        g = tl.load(scale_ptr + tl.maximum(expert, 0))
    codes, scale = quantize_blocks(tl.reshape(x, (BLOCK // 16, 16)), g)
    lo, hi = tl.split(tl.reshape(codes, (BLOCK // 2, 2)))
    packed = tl.reshape((lo | (hi << 4)).to(tl.uint8), (1, BLOCK // 2))
    values = tl.reshape(decode_tile(packed, tl.reshape(scale, (1, BLOCK // 16)), 1, BLOCK), (BLOCK,))
    tl.store(out_ptr + row * K + k, values.to(out_ptr.dtype.element_ty), mask=k < tl.where(expert >= 0, K, 0))


@triton.jit
def dequantize_rows(codes_ptr, bytes_ptr, scale_ptr, out_ptr, K, SCALE_PER_ROW: tl.constexpr, BLOCK: tl.constexpr):
    """One program per row: e2m1 * e4m3 * global scale, multiplied in this order in float32."""
    row = tl.program_id(0).to(tl.int64)
    half = tl.arange(0, BLOCK // 2)
    block = tl.arange(0, BLOCK // 16)
    codes = tl.load(codes_ptr + row * (K // 2) + half, mask=half < K // 2, other=0)
    scale = tl.load(bytes_ptr + row * (K // 16) + block, mask=block < K // 16, other=0)
    g = tl.load(scale_ptr + row * SCALE_PER_ROW)
    tile = decode_tile(tl.reshape(codes, (1, BLOCK // 2)), tl.reshape(scale, (1, BLOCK // 16)), 1, BLOCK)
    k = tl.arange(0, BLOCK)
    tl.store(out_ptr + row * K + k, (tl.reshape(tile, (BLOCK,)) * g).to(out_ptr.dtype.element_ty), mask=k < K)
