"""The two grouped GEMMs of a mixture-of-experts layer and the sum over a token's experts.

A slot is a routed row, token * top_k + j. Programs visit slots grouped by expert (ids.sort_slots); what they store
stays in slot order. Weights are decoded in registers; products accumulate in float32
and the global scales are applied there, before any narrower type.
"""

import triton
import triton.language as tl

from .activation import activate
from .codec import decode_tile
from .ids import find_tile, local_expert
from .packed import load_packed, packed_row, packed_size


@triton.jit
def load_weight(codes_ptr, bytes_ptr, n, N, k0, K, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr):
    """Tile [BLOCK_N, BLOCK_K] of a packed weight [N, K], decoded to float32; zeros outside."""
    half = k0 // 2 + tl.arange(0, BLOCK_K // 2)
    block = k0 // 16 + tl.arange(0, BLOCK_K // 16)
    live = n[:, None] < N
    code_mask = live if EVEN_K else live & (half[None, :] < K // 2)
    scale_mask = live if EVEN_K else live & (block[None, :] < K // 16)
    codes = tl.load(codes_ptr + n[:, None].to(tl.int64) * (K // 2) + half[None, :], mask=code_mask, other=0)
    scales = tl.load(bytes_ptr + n[:, None].to(tl.int64) * (K // 16) + block[None, :], mask=scale_mask, other=0)
    return decode_tile(codes, scales, BLOCK_N, BLOCK_K)


@triton.jit
def multiply(a, weight, acc):
    """Return acc + a @ weight.T; float32 goes in parts of 11 bits, and a weight is exact in one part."""
    return tl.dot(a, tl.trans(weight.to(a.dtype)), acc, input_precision="tf32x3")


@triton.jit
def row_scale(scale_ptr, row, expert, SCALE: tl.constexpr):
    """The activation scale of each row: none, one for all, one per expert, or one per row."""
    if SCALE == "none":
        return 1.0
    elif SCALE == "shared":
        return tl.load(scale_ptr)
    elif SCALE == "expert":
        return tl.load(scale_ptr + expert)
    else:
        return tl.load(scale_ptr + row)[:, None]


@triton.jit
def gemm1(
    x_ptr, x_scale_ptr, slots_ptr, starts_ptr, w_ptr, bytes_ptr, global_ptr, bias_ptr, h_ptr,
    K, INTER, E, slots_per_row, alpha, beta, limit,
    SCALE: tl.constexpr, GATED: tl.constexpr, KIND: tl.constexpr, LIMITED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, E_BLOCK: tl.constexpr,
    PACKED: tl.constexpr = False,
):  # fmt: skip
    """h[slot] = act(x W1^T, x W3^T), rounded to h's dtype. x [*, K]; w [E, N, K/2], rows gate then up, or PACKED."""
    expert, first, end = find_tile(starts_ptr, E, tl.program_id(1), BLOCK_M, E_BLOCK)
    if expert < 0:
        return
    sorted_row = first + tl.arange(0, BLOCK_M)
    live = sorted_row < end
    slot = tl.load(slots_ptr + sorted_row, mask=live, other=0).to(tl.int64)
    row = slot // slots_per_row
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    width = INTER * 2 if GATED else INTER
    codes = w_ptr + expert.to(tl.int64) * width * (K // 2)
    scales = bytes_ptr + expert.to(tl.int64) * width * (K // 16)
    if PACKED:
        codes = w_ptr + expert.to(tl.int64) * packed_size(width, K)
        scales = codes + 2048
    up_codes = codes + INTER.to(tl.int64) * (K // 2)
    up_scales = scales + INTER.to(tl.int64) * (K // 16)
    gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k0 in range(0, K, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        mask = live[:, None] if EVEN_K else live[:, None] & (k[None, :] < K)
        a = tl.load(x_ptr + row[:, None] * K + k[None, :], mask=mask, other=0.0)
        if PACKED:
            rows = packed_row(n, 0, GATED)
            gate = multiply(a, load_packed(codes, scales, rows, n < INTER, k0, K, BLOCK_N, BLOCK_K), gate)
            if GATED:
                rows = packed_row(n, 1, GATED)
                up = multiply(a, load_packed(codes, scales, rows, n < INTER, k0, K, BLOCK_N, BLOCK_K), up)
        else:
            gate = multiply(a, load_weight(codes, scales, n, INTER, k0, K, BLOCK_N, BLOCK_K, EVEN_K), gate)
            if GATED:
                up = multiply(a, load_weight(up_codes, up_scales, n, INTER, k0, K, BLOCK_N, BLOCK_K, EVEN_K), up)
    a_scale = row_scale(x_scale_ptr, row, expert, SCALE)
    gate = gate * (tl.load(global_ptr + expert * (2 if GATED else 1)) * a_scale)
    if GATED:
        up = up * (tl.load(global_ptr + expert * 2 + 1) * a_scale)
    if bias_ptr is not None:
        bias = bias_ptr + expert.to(tl.int64) * width
        gate += tl.load(bias + n, mask=n < INTER, other=0.0).to(tl.float32)[None, :]
        if GATED:
            up += tl.load(bias + INTER + n, mask=n < INTER, other=0.0).to(tl.float32)[None, :]
    h = activate(gate, up, alpha, beta, limit, KIND, LIMITED)
    out = h_ptr + slot[:, None] * INTER + n[None, :]
    tl.store(out, h.to(h_ptr.dtype.element_ty), mask=live[:, None] & (n[None, :] < INTER))


@triton.jit
def gemm2(
    h_ptr, h_scale_ptr, router_ptr, slots_ptr, starts_ptr, w_ptr, bytes_ptr, global_ptr, bias_ptr, out_ptr,
    K, N, E,
    SCALE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, E_BLOCK: tl.constexpr,
    PACKED: tl.constexpr = False,
):  # fmt: skip
    """out[slot] = p (h W2^T + bias) in float32. h [R, K] in slot order, as gemm1 left it."""
    expert, first, end = find_tile(starts_ptr, E, tl.program_id(1), BLOCK_M, E_BLOCK)
    if expert < 0:
        return
    sorted_row = first + tl.arange(0, BLOCK_M)
    live = sorted_row < end
    slot = tl.load(slots_ptr + sorted_row, mask=live, other=0).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    codes = w_ptr + expert.to(tl.int64) * N * (K // 2)
    scales = bytes_ptr + expert.to(tl.int64) * N * (K // 16)
    if PACKED:
        codes = w_ptr + expert.to(tl.int64) * packed_size(N, K)
        scales = codes + 2048
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k0 in range(0, K, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        mask = live[:, None] if EVEN_K else live[:, None] & (k[None, :] < K)
        a = tl.load(h_ptr + slot[:, None] * K + k[None, :], mask=mask, other=0.0)
        if PACKED:
            acc = multiply(a, load_packed(codes, scales, n, n < N, k0, K, BLOCK_N, BLOCK_K), acc)
        else:
            acc = multiply(a, load_weight(codes, scales, n, N, k0, K, BLOCK_N, BLOCK_K, EVEN_K), acc)
    a_scale = row_scale(h_scale_ptr, slot, expert, SCALE)
    acc = acc * (tl.load(global_ptr + expert) * a_scale)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + expert.to(tl.int64) * N + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    acc = acc * tl.load(router_ptr + slot, mask=live, other=0.0)[:, None]
    tl.store(out_ptr + slot[:, None] * N + n[None, :], acc, mask=live[:, None] & (n[None, :] < N))


@triton.jit
def sum_slots(partial_ptr, ids_ptr, map_ptr, out_ptr, N, num_ids, E, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """y[t] = sum of its live slots, in routing order; rows without one become zero."""
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for j in range(TOP_K):
        slot = token * TOP_K + j
        expert = local_expert(tl.load(ids_ptr + slot), map_ptr, num_ids, E)
        total += tl.load(partial_ptr + slot * N + n, mask=n < tl.where(expert >= 0, N, 0), other=0.0)
    tl.store(out_ptr + token * N + n, total.to(out_ptr.dtype.element_ty), mask=n < N)


@triton.jit(do_not_specialize=["M"])
def linear(
    x_ptr, x_scale_ptr, w_ptr, bytes_ptr, global_ptr, bias_ptr, out_ptr,
    M, K, N, global_stride,
    SCALE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """Out = x W^T + bias for a dense layer; global scale per output row (stride 1) or one for all (stride 0)."""
    row = (tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    live = row < M
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k0 in range(0, K, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        mask = live[:, None] if EVEN_K else live[:, None] & (k[None, :] < K)
        a = tl.load(x_ptr + row[:, None] * K + k[None, :], mask=mask, other=0.0)
        acc = multiply(a, load_weight(w_ptr, bytes_ptr, n, N, k0, K, BLOCK_N, BLOCK_K, EVEN_K), acc)
    a_scale = row_scale(x_scale_ptr, tl.where(live, row, 0), 0, SCALE)
    acc = acc * (tl.load(global_ptr + n * global_stride, mask=n < N, other=0.0)[None, :] * a_scale)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out_ptr + row[:, None] * N + n[None, :], acc.to(out_ptr.dtype.element_ty), mask=live[:, None] & (n[None, :] < N)
    )
