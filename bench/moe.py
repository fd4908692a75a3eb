"""One layer after routing, ours beside its peers: `python -m bench.moe [--shapes A,B] [--tokens 1,16] [--seconds 150]`.

Every implementation works on the same codes and is verified before it is timed: against dequantised weights in float32,
several measures at once. Timing is CUDA-graph replay; one graph holds several calls with other inputs and other
routing, so that more than three times the L2 is read in turn. Both ceilings are measured in the same run.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from bench import peers
from bench.goals import goal_of, judge
from bench.layer import Layer, Reference
from bench.record import RESULTS, write
from bench.shapes import SHAPES, Shape
from nvfp4 import route

TOKENS = (16, 64, 1, 256, 1024, 4096, 4, 2048)
"""In the order in which they are measured: what a short run leaves out stands last."""
SKEWED = (64, 1024)
LARGE = 16384
ROUTINGS = ("uniform", "zipf", "same")
"""Every expert as likely as another; the n-th as likely as 1/n; all tokens to the same experts."""
L2_BYTES = 60e6
REPLAYS_US = 60e3
"""About what the replays of one time may take together."""

Batch = tuple[Tensor, Tensor, Tensor]


def graph_us(calls: list, replays: int = 20) -> tuple[float, float]:
    """Median and spread in us of one call, from replays of a graph that holds them all; long ones are replayed less."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    torch.cuda.synchronize()
    once = event_us(graph.replay)
    count = max(5, min(replays, round(REPLAYS_US / once)))
    times = sorted(event_us(graph.replay) / len(calls) for _ in range(count + 2))[:count]
    return statistics.median(times), times[-1] - times[0]


def event_us(call: Callable) -> float:
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


def routing_scores(shape: Shape, tokens: int, routing: str, device: str = "cuda") -> Tensor:
    """Scores [tokens, E] whose k largest a router takes.

    Gumbel noise on log-probabilities: k experts drawn without replacement. Which experts are the frequent ones is drawn
    for every batch.
    """
    uniform = torch.rand(tokens, shape.experts, device=device).clamp_(1e-20, 1 - 1e-7)
    noise = -torch.log(-torch.log(uniform))
    if routing == "uniform":
        return noise
    rank = torch.randperm(shape.experts, device=device)
    if routing == "zipf":
        return noise - torch.log1p(rank.float())
    return torch.where(rank < shape.top_k, 100.0, 0.0) + 0.01 * noise


def inputs(shape: Shape, tokens: int, routing: str = "uniform") -> list[Batch]:
    """As many batches as it takes to read three times the L2."""
    batches: list[Batch] = []
    read = 0.0
    while len(batches) < 2 or (read < 3 * L2_BYTES + shape.expert_bytes and len(batches) < 32):
        x = torch.randn(tokens, shape.hidden, device="cuda").bfloat16()
        ids, router = route(routing_scores(shape, tokens, routing), top_k=shape.top_k)
        batches.append((x, ids, router))
        read += ids.unique().numel() * shape.expert_bytes
    return batches


def nodes(call: Callable) -> int:
    """Nodes of the graph of one call: its launches."""
    from cuda.bindings import driver

    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        call()
    code, _, count = driver.cuGraphGetNodes(driver.CUgraph(graph.raw_cuda_graph()), 0)
    if int(code):
        raise RuntimeError(f"cuGraphGetNodes: {code.name}")
    return int(count)


def host_us(call: Callable, calls: int = 200) -> float:
    """Median time until one eager call returns, with nothing else on the stream."""
    times = []
    for _ in range(calls + 20):
        torch.cuda.synchronize()
        begin = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - begin) / 1e3)
    torch.cuda.synchronize()
    return statistics.median(times[20:])


def identity(call: Callable[[], Tensor], replays: int) -> dict:
    """Whether replays give the same bits each time, and those of an eager call."""
    eager = call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    bits = out.view(torch.int16)
    differing = torch.zeros((), dtype=torch.int64, device=out.device)
    for _ in range(replays):
        out.fill_(float("nan"))
        graph.replay()
        differing += (bits != eager.view(torch.int16)).any()
    return {"replays": replays, "differing_from_eager": int(differing)}


class Clock:
    """What is left of a run's seconds, and a fair share of it for each model."""

    def __init__(self, seconds: float, models: int) -> None:
        self.end, self.models = time.monotonic() + seconds, models
        self.model_end = self.end

    def next_model(self) -> None:
        now = time.monotonic()
        self.model_end = now + (self.end - now) / self.models
        self.models -= 1

    @property
    def over(self) -> bool:
        return time.monotonic() > self.model_end


def point_of(layer: Layer, competitors: peers.Peers, tokens: int, routing: str, args: argparse.Namespace) -> dict:
    """One batch size and routing: everybody verified, then timed."""
    shape = layer.shape
    batches = inputs(shape, tokens, routing)
    touched = statistics.mean(ids.unique().numel() for _, ids, _ in batches)
    reference = Reference(layer, *batches[0])
    floor = shape.floor_us(tokens, round(touched), args.bandwidth, args.rate)
    times: dict[str, dict] = {}
    for precision in args.precisions:
        calls = [partial(layer.run, *batch, precision) for batch in batches]
        entry: dict = {"measures": reference.check(calls[0](), precision), "nodes": nodes(calls[0])}
        entry["us"], entry["spread_us"] = graph_us(calls)
        if tokens <= 64 and routing == "uniform":
            entry["host_us"] = host_us(calls[0])
        times[precision] = entry
    absent = []
    for name in competitors.at(tokens):
        run = competitors.get(name)
        if run is None:
            continue
        try:
            measured = reference.check(run(*batches[0]), "w4a16")
            us, spread = graph_us([partial(run, *batch) for batch in batches])
        except Exception as error:  # whatever a peer raises: it has no time here, and the reason is kept
            absent.append({"peer": name, "why": competitors.failed(name, error)})
            continue
        times[name] = {"measures": measured, "us": us, "spread_us": spread}
    rivals = {name: entry["us"] for name, entry in times.items() if name not in args.precisions}
    point = {"tokens": tokens, "routing": routing, "touched": touched, "floor_us": floor, "times": times}
    point["absent"] = absent
    first = times[args.precisions[0]]["us"]
    if routing == "uniform":
        point["judgement"] = judge(goal_of(shape, tokens), first, floor, rivals)
    bf16 = [us for name, us in rivals.items() if "bf16" in name]
    point["over_bf16"] = min(bf16) / first if bf16 else None
    return point


def measure(name: str, points: list[tuple[int, str]], clock: Clock, args: argparse.Namespace) -> dict:
    """One layer at every point that there is time for."""
    shape = SHAPES[name]
    layer = Layer(shape, layout=args.layout)
    competitors = peers.Peers(layer, args.peers)
    weights = layer.weights["w4a16"]
    result: dict = {
        "shape": name, "backend": weights.backend, "layout": weights.layout, "finalize_s": layer.finalize_s,
        "weight_bytes": weights.nbytes, "points": [], "left_out": [],
    }  # fmt: skip
    for tokens, routing in points:
        if clock.over:
            result["left_out"].append({"tokens": tokens, "routing": routing})
            continue
        point = point_of(layer, competitors, tokens, routing, args)
        result["points"].append(point)
        print(line(name, point), flush=True)
    if args.identity and not clock.over:
        batch = inputs(shape, min((t for t, _ in points), key=lambda t: abs(t - 16)))[0]
        result["identity"] = {
            precision: {"tokens": batch[0].shape[0], **identity(partial(layer.run, *batch, precision), args.identity)}
            for precision in args.precisions
        }
    result["absent"] = [{"peer": peer, "why": why} for peer, why in competitors.absent.items()]
    for entry in result["absent"]:
        print(f"{name:16} without {entry['peer']}: {entry['why']}")
    return result


def line(name: str, point: dict) -> str:
    """A point on one line of the terminal."""
    times = "  ".join(f"{k} {entry['us']:.1f}" for k, entry in point["times"].items())
    text = f"{name:16} M={point['tokens']:<5} {point['routing']:7} floor {point['floor_us']:.1f}  {times}"
    if "judgement" in point:
        j = point["judgement"]
        ratio = "" if j["over_peer"] is None else f", {j['over_peer']:.2f}x {j['best_peer']}"
        text += f"  | {j['of_goal_floor']:.2f} of {j['goal']:.2f}{ratio}{' met' if j['met'] else ''}"
    return text + "".join(f"  | no {a['peer']}: {a['why']}" for a in point["absent"])


def points_of(args: argparse.Namespace) -> list[tuple[int, str]]:
    """Tokens and routing of every point, in the order in which they are measured."""
    plain = [(tokens, "uniform") for tokens in args.tokens]
    skewed = [(tokens, routing) for routing, tokens in itertools.product(ROUTINGS[1:], args.skewed)]
    return plain + skewed + ([(LARGE, "uniform")] if args.large else [])


def parse(argv: list[str] | None) -> argparse.Namespace:
    def numbers(text: str) -> list[int]:
        return [int(v) for v in text.split(",") if v]

    def names(text: str) -> list[str]:
        return [v for v in text.split(",") if v]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--shapes", type=names, default=list(SHAPES))
    parser.add_argument("--tokens", type=numbers, default=list(TOKENS))
    parser.add_argument("--skewed", type=numbers, default=list(SKEWED), help="tokens of skewed routing; '' for none")
    parser.add_argument("--large", action="store_true", help=f"{LARGE} tokens too")
    parser.add_argument("--precisions", type=names, default=["w4a16", "w4a4_per_token"], help="the first is judged")
    parser.add_argument("--peers", type=names, default=list(peers.PEERS), help="'' for none")
    parser.add_argument("--layout", default="auto", help="of the weights: auto, sm90, checkpoint")
    parser.add_argument("--identity", type=int, default=1000, help="replays that must give the same bits; 0 for none")
    parser.add_argument("--seconds", type=float, default=1e9, help="shared among the layers; points that stand last go")
    parser.add_argument("--out", type=Path, default=RESULTS / "moe_sm90_h200.json")
    return parser.parse_args(argv)


@torch.no_grad()
def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    torch.manual_seed(0)
    begin = time.monotonic()
    clock_end = begin + args.seconds
    args.bandwidth, args.rate = ceilings()
    print(f"copy {args.bandwidth / 1e12:.2f} TB/s, bf16 product {args.rate / 1e12:.0f} TFLOP/s")
    points = points_of(args)
    if any(name.startswith("humming") for name in args.peers):
        try:
            peers.compile_humming([SHAPES[s] for s in args.shapes], sorted({tokens for tokens, _ in points}))
        except Exception as error:  # the layers say why again, each for itself
            print(f"humming was not compiled ahead: {peers.why(error)}")
        print(f"compiled in {time.monotonic() - begin:.0f} s", flush=True)
    Layer(Shape(128, 64, 2, 2), layout=args.layout)  # compiles what finalize launches, so that it is not timed
    layers = []
    clock = Clock(clock_end - time.monotonic(), len(args.shapes))
    for name in args.shapes:
        clock.next_model()
        layers.append(measure(name, points, clock, args))
        gc.collect()  # a class that a peer made keeps the layer's weights in a cycle
        torch.cuda.empty_cache()
        write(
            args.out, "python -m bench.moe", copy_bytes_per_s=args.bandwidth, bf16_flops=args.rate,
            precisions=args.precisions, seconds=time.monotonic() - begin, layers=layers,
        )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
