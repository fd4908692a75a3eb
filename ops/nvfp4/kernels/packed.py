"""Weights in the layout of the sm_90a kernels (nvfp4.sm90.layout), for what those kernels do not serve.

Blocks of 64 x 64 lie 2304 bytes apart, step by step along K: 2048 bytes of codes, 256 of scales. Each element looks up
its own word, which costs time and no exactness.
"""

import triton
import triton.language as tl

from .codec import decode_e2m1

WORDS = tl.constexpr(2304 // 4)


@triton.jit
def packed_row(n, part, GATED: tl.constexpr):
    """The layout's row of feature n; gate (part 0) and up (part 1) alternate in groups of 8."""
    if GATED:
        return n // 8 * 16 + n % 8 + 8 * part
    else:
        return n


@triton.jit
def packed_size(rows, K):
    """Bytes of one expert's weight with this many rows of the layout, a multiple of 64 where padded."""
    return ((rows + 63) // 64) * ((K + 63) // 64) * (4 * WORDS)


@triton.jit
def load_packed(codes_ptr, bytes_ptr, row, live, k0, K, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Tile [BLOCK_N, BLOCK_K] of one expert's weight at rows of the layout, decoded to float32; zeros outside."""
    steps = (K + 63) // 64
    first = ((row // 64).to(tl.int64) * (steps * WORDS) + row % 64 // 16 * 128 + row % 8 * 16)[:, None]
    below = (row % 16 // 8 == 1)[:, None]
    k = (k0 + tl.arange(0, BLOCK_K))[None, :]
    at = first + k // 64 * WORDS + k % 8 // 2 * 4 + k % 64 // 16
    mask = live[:, None] & (k < K)
    word = tl.load(codes_ptr.to(tl.pointer_type(tl.int32)) + at, mask=mask, other=0)
    odd = k % 2 == 1
    half = tl.where(odd, word >> 16, word)
    other = tl.where(odd, word, word >> 16)
    left = tl.where(below, (half >> 9 & 1) << 3 | half & 7, (half >> 15 & 1) << 3 | half >> 6 & 7)
    third = (other >> 3 & 1) << 3 | half >> 10 & 7
    right = tl.where(below, (half >> 13 & 1) << 3 | (half >> 14 & 1) << 2 | half >> 4 & 3, third)
    values = decode_e2m1(tl.where(k % 16 // 8 == 1, right, left))
    block = (k0 // 16 + tl.arange(0, BLOCK_K // 16))[None, :]
    at = (row // 64).to(tl.int64)[:, None] * (steps * WORDS) + block // 4 * WORDS
    at += (row % 64 // 16 * 16 + row % 8 * 2)[:, None] + block % 4 // 2
    mask = live[:, None] & (block < (K + 15) // 16)
    word = tl.load(bytes_ptr.to(tl.pointer_type(tl.int32)) + at, mask=mask, other=0)
    even = tl.where(below, word >> 20, word >> 4)
    turned = tl.where(below, (word >> 28 & 15) | (word & 15) << 4, word >> 12)
    byte = tl.where(block % 2 == 1, turned, even) & 0xFF
    scale = ((byte >> 3) + 117 << 23 | (byte & 7) << 20).to(tl.float32, bitcast=True)  # a byte of 0 has zero codes only
    scale = tl.where(byte >> 3 == 31, float("nan"), scale)
    tile = tl.reshape(values, (BLOCK_N, BLOCK_K // 16, 16)) * tl.expand_dims(scale, 2)
    return tl.reshape(tile, (BLOCK_N, BLOCK_K))
