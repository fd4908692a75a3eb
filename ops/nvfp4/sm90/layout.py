"""The layout of weights that sm_90a kernels read: blocks of 64 x 64 codes, each thread's fragment in 16 bytes.

A warpgroup's matrix instruction takes 64 rows of weights from registers: lane l of warp w holds rows 16 w + l // 4 and
8 more, columns 2 (l % 4) + {0, 1} and 8 more, of every 16 columns. Thread t of a block therefore finds its 32 codes in
bytes 16 t .. 16 t + 15, one 32-bit word for each 16 columns; the low half of a word has the even column. The four codes
of a half (rows r, r + 8; columns c, c + 8) lie so that sign and magnitude come out by one mask after shifts by 0, 3 and
6; the fourth takes the bits that are left:

    bit     15  14  13  12  11  10   9  8-6  5-3  2-0
    code    s0  s3  m3' s1  m3" m3" s2  m0   m1   m2      (m3" its upper two magnitude bits, m3' the lowest)

Block scales become exponent 5, mantissa 3, bias 10, which holds the subnormals of e4m3 too: 8 bytes for rows r and r + 8.
A zero scale takes its codes along (all zero), a negative one their signs, NaN stays NaN: products are what they were.
Gate and up rows alternate in groups of 8, so that both meet in one thread. Rows and columns are padded with zero codes.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ..format import GROUP

BLOCK = 64
"""Rows and columns of one block."""
CODE_BYTES, SCALE_BYTES = 2048, 256
NAN_BYTE = 0xA4
"""Of exponent 20: with the kernels' bias it becomes the exponent of infinity and NaN."""


def blocks_of(rows: int, gated: bool) -> int:
    """64-row blocks of a weight with ``rows`` output features (per part, if gated)."""
    per_block = BLOCK // 2 if gated else BLOCK
    return -(-rows // per_block)


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


def pack(codes: Tensor, block_scale: Tensor, gated: bool) -> tuple[Tensor, Tensor]:
    """Checkpoint layout to kernel layout, on the tensors' device.

    Args:
        codes: uint8 [N, K/2] of one expert, rows gate then up if gated. block_scale: uint8 [N, K/16].

    Returns:
        uint8 [blocks, steps, 2048] and [blocks, steps, 256].
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
    bytes_ = packed.view(blocks, 4, 2, 8, steps, 4, 2, 4).permute(0, 4, 1, 3, 7, 5, 6, 2)
    words = torch.stack([_half(bytes_ & 0xF), _half(bytes_ >> 4)], dim=-1)
    tiles = torch.stack([words & 0xFF, words >> 8], dim=-1).to(torch.uint8)
    scales = scale.view(blocks, 4, 2, 8, steps, 4).permute(0, 4, 1, 3, 2, 5)
    return tiles.reshape(blocks, steps, CODE_BYTES), scales.reshape(blocks, steps, SCALE_BYTES)


def _half(codes: Tensor) -> Tensor:
    """16 bits from four codes [..., column high, row high]: fields 0..3 are row + 2 column."""
    c = codes.int()
    fields = (c[..., 0, 0], c[..., 0, 1], c[..., 1, 0], c[..., 1, 1])
    out = torch.zeros_like(fields[0])
    for field, (sign, low) in zip(fields, ((15, 6), (12, 3), (9, 0)), strict=False):
        out |= (field >> 3) << sign | (field & 7) << low
    last = fields[3]
    return out | (last >> 3) << 14 | (last >> 1 & 3) << 10 | (last & 1) << 13


def unpack(tiles: Tensor, scales: Tensor, rows: int, k: int, gated: bool) -> tuple[Tensor, Tensor]:
    """The inverse, up to the zero blocks' codes and scales, which come back as zeros: codes [N, K/2], bytes [N, K/16]."""
    blocks, steps = tiles.shape[:2]
    pair = tiles.view(blocks, steps, 4, 8, 4, 4, 2, 2).int()
    word = pair[..., 0] | pair[..., 1] << 8
    fields = [(word >> sign & 1) << 3 | word >> low & 7 for sign, low in ((15, 6), (12, 3), (9, 0))]
    fields.append((word >> 14 & 1) << 3 | (word >> 10 & 3) << 1 | word >> 13 & 1)
    codes = torch.stack(fields, -1).view(*word.shape, 2, 2)  # ..., even or odd column, column high, row high
    both = codes[..., 0, :, :] | codes[..., 1, :, :] << 4
    # block, step, warp, lane row, lane column, sixteen, column high, row high
    packed = both.permute(0, 2, 7, 3, 1, 5, 6, 4).reshape(blocks * BLOCK, steps * BLOCK // 2)
    scale = scales.view(blocks, steps, 4, 8, 2, 4).permute(0, 2, 4, 3, 1, 5).reshape(blocks * BLOCK, steps * 4)
    back = torch.zeros(256, dtype=torch.uint8, device=tiles.device)
    table = _scale_bytes().to(tiles.device)
    back[table.int()] = torch.arange(128, dtype=torch.uint8, device=tiles.device)
    scale = back[scale.int()]
    order = _row_order(rows, gated).to(tiles.device)
    n = rows * (2 if gated else 1)
    source = torch.empty(n, dtype=torch.long, device=tiles.device)
    live = order < n
    source[order[live]] = torch.arange(order.numel(), device=tiles.device)[live]
    return packed[source, : k // 2].to(torch.uint8), scale[source, : k // GROUP]
