"""The layout of weights that sm_90a kernels read: blocks of 64 x 64 codes, each thread's fragment in 16 bytes.

A warpgroup's matrix instruction takes 64 rows of weights from registers: lane l of warp w holds rows 16 w + l // 4 and
8 more, columns 2 (l % 4) + {0, 1} and 8 more, of every 16 columns. Thread t of a block therefore finds its 32 codes in
bytes 16 t .. 16 t + 15, one 32-bit word for each 16 columns; the low half of a word has the even column. The four codes
of a half (0: row r, column c; 1: row r + 8; 2: column c + 8; 3: both) lie so that sign and magnitude reach bits 15 and
8-6, where they are a bfloat16, in nine operations for eight codes: by a mask after no shift, a left shift by 6 and a
rotation by 4; the fourth takes two masks, after shifts by 2 and -6:

    bit     15  14    13  12-10  9   8-6  5-4   3   2-0
    code    s0  m3[2] s3  m2     s1  m0   m3[1] s2* m1      * of the other half's code: rotation carries it over

Block scales become exponent 5, mantissa 3, bias 10, which holds the subnormals of e4m3 too. A word has those of 32
columns: rows r and r + 8 of the even 16 at bits 11-4 and 27-20, of the odd 16 there after a rotation by 8.
A zero scale takes its codes along (all zero), a negative one their signs, NaN stays NaN: products are what they were.
Gate and up rows alternate in groups of 8, so that both meet in one thread. Features and columns are padded to 64 with
zero codes.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ..format import GROUP

BLOCK = 64
"""Rows and columns of one block."""
CODE_BYTES, SCALE_BYTES = 2048, 256
NAN_BYTE = 0xFC
"""Of exponent 31: the kernels make it the exponent of infinity and NaN."""


def blocks_of(rows: int, gated: bool) -> int:
    """64-row blocks of a weight with ``rows`` output features (per part, if gated: two parts)."""
    return -(-rows // BLOCK) * (2 if gated else 1)


def steps_of(k: int) -> int:
    """64-column blocks along K."""
    return -(-k // BLOCK)


@functools.cache
def _scale_bytes() -> Tensor:
    """e4m3 byte (sign dropped) to the byte kept here; a zero scale becomes 0, and its codes go."""
    table = torch.zeros(128, dtype=torch.uint8)
    for byte in range(1, 127):
        exponent, mantissa = byte >> 3, byte & 7
        if exponent == 0:  # mantissa * 2^-9, normalised
            shift = 3 - mantissa.bit_length() + 1
            exponent, mantissa = 1 - shift, (mantissa << shift) & 7
        table[byte] = (exponent + 3) << 3 | mantissa
    table[127] = NAN_BYTE
    return table


def _row_order(rows: int, gated: bool) -> Tensor:
    """Source row of each row in the layout; ``rows * parts`` where it is padding."""
    blocks = blocks_of(rows, gated)
    if not gated:
        order = torch.arange(blocks * BLOCK)
        return torch.where(order < rows, order, rows)
    feature = torch.arange(blocks * BLOCK // 2).reshape(-1, 1, 8)
    order = torch.cat([feature, feature + rows], 1)
    return torch.where(feature < rows, order, 2 * rows).flatten()


def pack(codes: Tensor, block_scale: Tensor, gated: bool) -> Tensor:
    """Checkpoint layout to kernel layout, on the tensors' device.

    Args:
        codes: uint8 [N, K/2] of one expert, rows gate then up if gated. block_scale: uint8 [N, K/16].

    Returns:
        uint8 [blocks, steps, 2304]: 2048 bytes of codes, 256 of scales.
    """
    n, k = codes.shape[0], codes.shape[1] * 2
    order = _row_order(n // 2 if gated else n, gated).to(codes.device)
    blocks, steps = order.numel() // BLOCK, steps_of(k)
    scale = torch.zeros(n + 1, steps * 4, dtype=torch.uint8, device=codes.device)
    scale[:n, : k // GROUP] = block_scale
    scale = scale[order]
    packed = torch.zeros(n + 1, steps * BLOCK // 2, dtype=torch.uint8, device=codes.device)
    packed[:n, : k // 2] = codes
    packed = packed[order]
    flip = ((scale >> 7) * 0x88).repeat_interleave(8, dim=1)
    keep = ((scale & 0x7F) != 0).repeat_interleave(8, dim=1)
    packed = torch.where(keep, packed ^ flip, 0)
    scale = _scale_bytes().to(codes.device)[(scale & 0x7F).int()]
    # rows: block, warp, high, lane row; columns: step, sixteen, high, lane column, (two codes in one byte)
    bytes_ = packed.view(blocks, 4, 2, 8, steps, 4, 2, 4).permute(0, 4, 1, 3, 7, 5, 6, 2).int()
    low, high = bytes_ & 0xF, bytes_ >> 4
    words = torch.stack([_half(low, high), _half(high, low)], dim=-1)
    tiles = torch.stack([words & 0xFF, words >> 8], dim=-1).to(torch.uint8)
    # block, step, warp, lane row, pair of sixteens, odd sixteen, row high
    s = scale.view(blocks, 4, 2, 8, steps, 2, 2).permute(0, 4, 1, 3, 5, 6, 2).int()
    even0, even8, odd0, odd8 = s[..., 0, 0], s[..., 0, 1], s[..., 1, 0], s[..., 1, 1]
    parts = (
        (even0 & 15) << 4 | odd8 >> 4, even0 >> 4 | (odd0 & 15) << 4,
        odd0 >> 4 | (even8 & 15) << 4, even8 >> 4 | (odd8 & 15) << 4,
    )  # fmt: skip
    scales = torch.stack(parts, -1).to(torch.uint8)
    return torch.cat([tiles.reshape(blocks, steps, CODE_BYTES), scales.reshape(blocks, steps, SCALE_BYTES)], -1)


def _half(codes: Tensor, other: Tensor) -> Tensor:
    """16 bits from four codes [..., column high, row high] of one half, and the sign of the other half's third."""
    c0, c1, c2, c3 = codes[..., 0, 0], codes[..., 0, 1], codes[..., 1, 0], codes[..., 1, 1]
    first = (c0 >> 3) << 15 | (c0 & 7) << 6 | (c1 >> 3) << 9 | (c1 & 7) | (c2 & 7) << 10 | (other[..., 1, 0] >> 3) << 3
    return first | (c3 >> 3) << 13 | (c3 >> 2 & 1) << 14 | (c3 & 3) << 4


def unpack(packed: Tensor, rows: int, k: int, gated: bool) -> tuple[Tensor, Tensor]:
    """The inverse, but that blocks of scale zero come back with zero codes: codes [N, K/2], scales [N, K/16]."""
    blocks, steps = packed.shape[:2]
    tiles, scales = packed.split([CODE_BYTES, SCALE_BYTES], -1)
    pair = tiles.reshape(blocks, steps, 4, 8, 4, 4, 2, 2).int()
    word = pair[..., 0] | pair[..., 1] << 8
    third = (word.flip(-1) >> 3 & 1) << 3 | word >> 10 & 7
    last = (word >> 13 & 1) << 3 | (word >> 14 & 1) << 2 | word >> 4 & 3
    fields = [(word >> 15 & 1) << 3 | word >> 6 & 7, (word >> 9 & 1) << 3 | word & 7, third, last]
    codes = torch.stack(fields, -1).view(*word.shape, 2, 2)  # ..., even or odd column, column high, row high
    both = codes[..., 0, :, :] | codes[..., 1, :, :] << 4
    # block, step, warp, lane row, lane column, sixteen, column high, row high
    rows_ = both.permute(0, 2, 7, 3, 1, 5, 6, 4).reshape(blocks * BLOCK, steps * BLOCK // 2)
    q0, q1, q2, q3 = scales.reshape(blocks, steps, 4, 8, 2, 4).int().unbind(-1)
    even = (q0 >> 4 | (q1 & 15) << 4, q2 >> 4 | (q3 & 15) << 4)
    odd = (q1 >> 4 | (q2 & 15) << 4, q3 >> 4 | (q0 & 15) << 4)
    # block, step, warp, lane row, pair, odd sixteen, row high
    scale = torch.stack([torch.stack(even, -1), torch.stack(odd, -1)], -2)
    scale = scale.permute(0, 2, 6, 3, 1, 4, 5).reshape(blocks * BLOCK, steps * 4)
    back = torch.zeros(256, dtype=torch.uint8, device=tiles.device)
    table = _scale_bytes().to(tiles.device)
    back[table.int()] = torch.arange(128, dtype=torch.uint8, device=tiles.device)
    scale = back[scale.int()]
    order = _row_order(rows, gated).to(tiles.device)
    n = rows * (2 if gated else 1)
    source = torch.empty(n, dtype=torch.long, device=tiles.device)
    live = order < n
    source[order[live]] = torch.arange(order.numel(), device=tiles.device)[live]
    return rows_[source, : k // 2].to(torch.uint8), scale[source, : k // GROUP]
