"""Callables without a fault, each near one that has it: none may ever be flagged."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from graph_tests.tests.faulty import E, H, K, make

INTER = 128


def make_moe(seed: int, size: int = 64):
    """x, router logits, and two stacks of expert weights."""
    g = torch.Generator(device="cuda").manual_seed(seed)
    x = torch.randn(size, H, device="cuda", generator=g, dtype=torch.float32).bfloat16()
    logits = torch.randn(size, E, device="cuda", generator=g)
    w13 = (torch.randn(E, H, 2 * INTER, device="cuda", generator=g) * 0.05).bfloat16()
    w2 = (torch.randn(E, INTER, H, device="cuda", generator=g) * 0.05).bfloat16()
    return x, logits, w13, w2


def moe(x, logits, w13, w2):
    weights, ids = logits.softmax(-1).topk(K, dim=-1)
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    ones = torch.ones_like(flat, dtype=torch.int32)
    offs = torch.zeros(E, dtype=torch.int32, device=x.device).scatter_add_(0, flat, ones).cumsum(0, dtype=torch.int32)
    token = order // K
    gate, up = F.grouped_mm(x[token], w13, offs=offs).chunk(2, dim=-1)
    y = F.grouped_mm((F.silu(gate) * up).contiguous(), w2, offs=offs)
    scaled = y.float() * weights.flatten()[order].unsqueeze(-1)
    return torch.zeros(x.shape, device=x.device).index_add_(0, token, scaled).to(x.dtype)


def masked_fill(x, ids):
    x = x.clone()
    x[x < 0] = 0.0
    return x


def repeat(x, ids):
    counts = torch.full((x.shape[0],), 2, device=x.device)
    return x.repeat_interleave(counts, dim=0, output_size=2 * x.shape[0])


def counting(x, ids):
    histogram = torch.histc(x, bins=16, min=-4, max=4)
    where = torch.nonzero_static(x[:, 0] > 0, size=16)
    place = torch.searchsorted(histogram.cumsum(0), torch.full((4,), 9.0, device=x.device))
    return histogram, where, place


def dropout(x, ids):
    return F.dropout(x, 0.5, training=True)


def multinomial(x, ids):
    return torch.multinomial(x.abs() + 0.1, 4)


def forked(x, ids):
    main = torch.cuda.current_stream()
    side = torch.cuda.Stream()
    side.wait_stream(main)
    with torch.cuda.stream(side):
        y = x.sin()
    z = x.cos()
    main.wait_stream(side)
    return y + z


class Refilled:
    """Copies its input into a buffer of its own, as deployments do before a replay."""

    def __init__(self):
        self.buffer = None

    def __call__(self, x, ids):
        if self.buffer is None:
            self.buffer = torch.empty_like(x)
        self.buffer.copy_(x)
        return self.buffer * 2


@triton.jit
def persistent_kernel(out, x, counts, experts, width, BLOCK: tl.constexpr):
    """Adds up, for each expert, as many rows as the device says, from a grid that never changes."""
    columns = tl.arange(0, BLOCK)
    for expert in range(tl.program_id(0), experts, tl.num_programs(0)):
        total = tl.zeros((BLOCK,), tl.float32)
        rows = tl.load(counts + expert)
        for row in range(0, rows):
            total += tl.load(x + row * width + columns, mask=columns < width, other=0.0)
        tl.store(out + expert * width + columns, total, mask=columns < width)


def persistent(x, ids):
    flat = ids.flatten()
    live = (flat >= 0).to(torch.int32)
    counts = torch.zeros(E, dtype=torch.int32, device=x.device).scatter_add_(0, flat.clamp(min=0), live)
    counts = counts.clamp(max=x.shape[0])
    out = torch.empty(E, x.shape[1], device=x.device)
    persistent_kernel[(16,)](out, x, counts, E, x.shape[1], BLOCK=256)
    return out


make_plain = make
