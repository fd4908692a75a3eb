"""One layer after routing, ours beside bfloat16 grouped products: `python -m bench.moe [--shapes A,B] [--tokens 1,16]`.

Every point is verified before it is timed: against dequantised weights in float32, several measures at once. Timing is
CUDA-graph replay; one graph holds several calls with other inputs and other routing, so that more than three times the
L2 is read in turn. Both ceilings are measured in the same run.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.record import RESULTS, write
from bench.shapes import SHAPES, TOKENS, Shape
from nvfp4 import dequantize, route

BANDS = {  # cosine, relative L2, |gain - 1|, worst token's cosine
    "w4a16": (0.9999, 0.01, 0.005, 0.9995),
    "w4a4_per_token": (0.98, 0.20, 0.05, 0.97),
}
L2_BYTES = 60e6


class Layer:
    """Random codes and moderate scales, on the GPU."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        e, h, i = shape.experts, shape.hidden, shape.inter

        def random(low: int, high: int, *size: int) -> Tensor:
            return torch.randint(low, high, size, dtype=torch.uint8, device="cuda")

        self.w13, self.s13 = random(0, 256, e, 2 * i, h // 2), random(0x30, 0x40, e, 2 * i, h // 16)
        self.w2, self.s2 = random(0, 256, e, h, i // 2), random(0x30, 0x40, e, h, i // 16)
        self.g13 = torch.full((e, 2), 0.25 * h**-0.5, device="cuda")
        self.g2 = torch.full((e,), 0.25 * i**-0.5, device="cuda")

    def run(self, x: Tensor, ids: Tensor, router: Tensor, precision: str) -> Tensor:
        return torch.ops.nvfp4.moe(
            x, ids, router, self.w13, self.s13, self.g13, self.w2, self.s2, self.g2, precision=precision
        )

    def expert(self, e: int) -> tuple[Tensor, Tensor]:
        """Dequantised w13 [2I, H] and w2 [H, I], float32."""
        inter = self.shape.inter
        scale = self.g13[e].repeat_interleave(inter).unsqueeze(1)
        return (
            dequantize(self.w13[e], self.s13[e], scale, torch.float32),
            dequantize(self.w2[e], self.s2[e], self.g2[e : e + 1], torch.float32),
        )

    def reference(self, x: Tensor, ids: Tensor, router: Tensor) -> Tensor:
        """float32, one expert at a time; h rounded to x's dtype as the operator does."""
        out = torch.zeros(x.shape, device="cuda")
        for e in ids.unique().tolist():
            token, j = torch.where(ids == e)
            w13, w2 = self.expert(e)
            g, u = (x[token].float() @ w13.T).chunk(2, dim=1)
            h = (F.silu(g) * u).to(x.dtype).float()
            out.index_add_(0, token, (h @ w2.T) * router[token, j].unsqueeze(1))
        return out


class Grouped:
    """torch's grouped_mm over bfloat16 weights, sort and sum included, compiled."""

    def __init__(self, layer: Layer) -> None:
        e, h, i = layer.shape.experts, layer.shape.hidden, layer.shape.inter
        self.w13 = torch.empty(e, h, 2 * i, dtype=torch.bfloat16, device="cuda")
        self.w2 = torch.empty(e, i, h, dtype=torch.bfloat16, device="cuda")
        for expert in range(e):
            w13, w2 = layer.expert(expert)
            self.w13[expert], self.w2[expert] = w13.T.bfloat16(), w2.T.bfloat16()
        self.run = torch.compile(self._run, fullgraph=True, dynamic=True)

    def _run(self, x: Tensor, ids: Tensor, router: Tensor) -> Tensor:
        experts, top_k = self.w13.shape[0], ids.shape[1]
        order = ids.flatten().argsort(stable=True)
        ones = torch.ones(ids.numel(), dtype=torch.int32, device=x.device)
        counts = torch.zeros(experts, dtype=torch.int32, device=x.device).scatter_add_(0, ids.flatten().long(), ones)
        offsets = counts.cumsum(0, dtype=torch.int32)
        g, u = F.grouped_mm(x[order // top_k], self.w13, offs=offsets).chunk(2, dim=-1)
        y = F.grouped_mm((F.silu(g) * u).contiguous(), self.w2, offs=offsets)
        weighted = y.float() * router.flatten()[order].unsqueeze(1)
        slots = torch.empty_like(weighted).index_copy_(0, order, weighted)
        return slots.view(x.shape[0], top_k, -1).sum(1).to(x.dtype)


def measures(got: Tensor, want: Tensor) -> tuple[float, ...]:
    """Cosine, relative L2, gain (slope), worst token's cosine."""
    got, want = got.double(), want.double()
    cos = F.cosine_similarity(got.flatten(), want.flatten(), dim=0)
    gain = (got * want).sum() / (want * want).sum()
    return tuple(float(v) for v in (cos, (got - want).norm() / want.norm(), gain, F.cosine_similarity(got, want).min()))


def verify(layer: Layer, x: Tensor, ids: Tensor, router: Tensor, precision: str) -> tuple[float, ...]:
    """Measures over at most 32 tokens of the batch.

    Raises:
        AssertionError: outside the bands; a wrong kernel has no time.
    """
    some = slice(0, 32)
    got = measures(layer.run(x, ids, router, precision)[some], layer.reference(x[some], ids[some], router[some]))
    cos, l2, gain, worst = BANDS[precision]
    assert got[0] >= cos and got[1] <= l2 and abs(got[2] - 1) <= gain and got[3] >= worst, (precision, got)
    return got


def graph_us(calls: list, replays: int = 20) -> tuple[float, float]:
    """Median and spread in us of one call, from replays of a graph that holds them all."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(replays + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    times = sorted(times[3:])
    return statistics.median(times), times[-1] - times[0]


def event_us(call) -> float:
    """One call between two events, outside of any graph: a copy in a graph is a node of its own kind, and slower."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3


def ceilings() -> tuple[float, float]:
    """Copy bandwidth in bytes/s, read plus written, and bfloat16 matrix rate in FLOP/s."""
    a = torch.empty(2**31, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    copy = min(event_us(partial(b.copy_, a)) for _ in range(10))
    x, y = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product, _ = graph_us([lambda: x @ y] * 4, 10)
    return 2 * a.numel() / copy * 1e6, 2 * 8192**3 / product * 1e6


def inputs(shape: Shape, tokens: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """As many batches as it takes to read three times the L2."""
    touched = min(shape.experts, tokens * shape.top_k) * shape.expert_bytes
    count = max(2, min(32, round(3 * L2_BYTES / touched) + 1))
    batches = []
    for _ in range(count):
        x = torch.randn(tokens, shape.hidden, device="cuda").bfloat16()
        ids, router = route(torch.randn(tokens, shape.experts, device="cuda"), top_k=shape.top_k)
        batches.append((x, ids, router))
    return batches


def measure(name: str, sizes: list[int], bandwidth: float, rate: float, with_bf16: bool) -> list[dict]:
    """Every batch size of one layer, verified, then timed."""
    shape = SHAPES[name]
    layer = Layer(shape)
    grouped = Grouped(layer) if with_bf16 else None
    points = []
    for tokens in sizes:
        batches = inputs(shape, tokens)
        touched = statistics.mean(ids.unique().numel() for _, ids, _ in batches)
        floor = shape.floor_us(tokens, round(touched), bandwidth, rate)
        point: dict = {"shape": name, "tokens": tokens, "floor_us": floor}
        for precision in BANDS:
            point[f"{precision}_measures"] = verify(layer, *batches[0], precision)
            calls = [partial(layer.run, *batch, precision) for batch in batches]
            point[f"{precision}_us"], point[f"{precision}_spread_us"] = graph_us(calls)
        if grouped is not None:
            point["bf16_us"], _ = graph_us([partial(grouped.run, *batch) for batch in batches])
        points.append(point)
        times = "  ".join(f"{k[:-3]} {v:8.1f}" for k, v in point.items() if k.endswith("_us") and "spread" not in k)
        print(f"{name:16} M={tokens:<5} {times}  w4a16 {floor / point['w4a16_us']:.2f} of the floor", flush=True)
    return points


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--no-bf16", action="store_true", help="leave torch's grouped_mm out")
    parser.add_argument("--out", type=Path, default=RESULTS / "moe_h200.json")
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    bandwidth, rate = ceilings()
    print(f"copy {bandwidth / 1e12:.2f} TB/s, bf16 product {rate / 1e12:.0f} TFLOP/s")
    points = []
    for name in args.shapes.split(","):
        points += measure(name, [int(t) for t in args.tokens.split(",")], bandwidth, rate, not args.no_bf16)
        torch.cuda.empty_cache()
    write(args.out, "python -m bench.moe", copy_bytes_per_s=bandwidth, bf16_flops=rate, points=points)
    return 0


if __name__ == "__main__":
    sys.exit(main())
