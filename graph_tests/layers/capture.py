"""Capture layer: the callable is captured in global mode, the graph is walked, and captures of other data compared.

Misses what a kernel reads through pointers inside its own buffers; replay sees the consequence.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import torch

from graph_tests.inputs import tensors
from graph_tests.layers import graphwalk, profile
from graph_tests.layers.bench import Bench, raw_stream, rebind, static_args
from graph_tests.layers.compilehooks import Compilation, watch_triton
from graph_tests.layers.findings import Findings
from graph_tests.layers.graphwalk import Node, Walk
from graph_tests.layers.lines import LineClock
from graph_tests.layers.oplog import ApiNames, OpLog
from graph_tests.layers.optable import operation_name
from graph_tests.layers.runahead import WAITS
from graph_tests.source import where_defined, where_raised
from graph_tests.verdict import Check, Kind, Status, Where

OWN_KERNELS = "FillFunctor<long>"
TORCH_KERNELS = (
    "at::native",
    "at6native",
    "at_cuda_detail",
    "cub::",
    "3cub",
    "cutlass",
    "cublas",
    "gemm",
    "splitK",
    "nvjet",
)


@dataclasses.dataclass
class Captured:
    """One capture: the graph or why there is none."""

    graph: Any
    out: Any = None
    error: BaseException | None = None
    end_error: BaseException | None = None
    log: OpLog | None = None
    compiled: list[Compilation] = dataclasses.field(default_factory=list)
    trace: profile.Trace | None = None
    clock: LineClock | None = None

    @property
    def failed(self) -> bool:
        """True when there is no graph to replay."""
        return self.error is not None or self.end_error is not None


def capture(
    bench: Bench,
    args: Any,
    *,
    pool: Any = None,
    logged: bool = False,
    profiled: bool = False,
    clock: LineClock | None = None,
) -> Captured:
    """Capture one call on a fresh side stream; ``logged`` keeps its operations, ``profiled`` what was executed."""
    result = Captured(torch.cuda.CUDAGraph(keep_graph=True), clock=clock)
    stream, before = torch.cuda.Stream(), torch.cuda.current_stream()
    bench.capture_stream = stream.cuda_stream
    torch.cuda.synchronize()
    api = ApiNames()
    with contextlib.ExitStack() as outer:
        outer.enter_context(torch.no_grad())
        profiler = outer.enter_context(profile.Profiler()) if profiled and not profile.busy() else None
        if logged:
            outer.enter_context(watch_triton(result.compiled))
        try:
            with torch.cuda.graph(result.graph, pool=pool, stream=stream, capture_error_mode="global"):
                try:
                    with contextlib.ExitStack() as inner:
                        if profiler is not None:
                            inner.enter_context(profiler.window())
                        inner.enter_context(_sync_errors())
                        if logged and not bench.compiled:
                            result.log = OpLog(api, args, stream_of=raw_stream)
                            inner.enter_context(bench.logging(api, result.log))
                        if result.clock is not None:
                            inner.enter_context(result.clock)
                        result.out = bench.capture_fn(*args)
                except Exception as error:
                    result.error = error
        except Exception as error:
            result.end_error = error
        finally:  # torch's context does not restore the stream when ending the capture fails
            torch.cuda.set_stream(before)
    if profiler is not None:
        result.trace = profiler.trace
    return result


@contextlib.contextmanager
def _sync_errors() -> Any:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def check_capture(bench: Bench) -> Check:
    """Capture, walk and compare."""
    if bench.broken:
        return bench.skip("capture", bench.broken)
    waits = [f for f in bench.found if f.kind in WAITS]
    if waits:
        bench.broken = f"not captured: the callable waits for the device ({waits[0].kind}: {waits[0].operation})"
        return bench.skip("capture", bench.broken)
    found = Findings()
    notes: list[str] = []
    evidence: list[str] = []
    unsure: list[str] = []
    args = static_args(bench.args)
    if bench.compiled:  # compile outside the capture
        bench.call(bench.capture_fn, args)
    first = capture(bench, args, logged=True, profiled=True, clock=None if bench.compiled else LineClock())
    home = where_defined(bench.eager)
    for event in first.compiled:
        found.add(
            event.kind, event.kernel, event.where or home, f"kernel {event.kernel} was {event.what} in the capture"
        )
    if first.failed:
        _explain(bench, first, found)
        bench.broken = "the capture failed"
        evidence += [f"{type(e).__name__}: {str(e)[:600]}" for e in (first.error, first.end_error) if e is not None]
        return Check("capture", Status.FAIL, "", found.tuple(), evidence=tuple(evidence))
    _escaped(first, found, home, unsure)
    walked = graphwalk.walk(first.graph.raw_cuda_graph())
    evidence.append(f"{len(walked.nodes)} nodes, {len(walked.edges)} edges")
    lines = _Locator(bench, args)
    _nodes(bench, walked, lines, args, found, notes, unsure)
    if not found.has(Kind.COMPILE_IN_CAPTURE, Kind.AUTOTUNE_IN_CAPTURE):
        _compare(bench, args, walked, lines, found, evidence, unsure)
    del first
    status = Status.FAIL if found else Status.INCONCLUSIVE if unsure else Status.PASS
    return Check("capture", status, "; ".join(unsure[:3]), found.tuple(), tuple(notes), tuple(evidence + unsure))


def _explain(bench: Bench, failed: Captured, found: Findings) -> None:
    """A finding for a capture that failed, unless the compile hooks said it already."""
    if found:
        return
    home = where_defined(bench.eager)
    where = (where_raised(failed.error) if failed.error is not None else None) or home
    shown = " ".join(f"{failed.error or ''} {failed.end_error or ''}".split())[:240]
    low = shown.lower()
    ops = failed.log.ops if failed.log is not None else []
    last = failed.log.current if failed.log is not None else None
    if failed.error is None and "unjoined" in low:
        side = next((op for op in ops if op.stream != bench.capture_stream), None)
        found.add(Kind.STREAM_FORK, side.qualified if side else "side stream", side.where if side else home, shown)
    elif last is not None and last.kind is not None:
        found.add(last.kind, operation_name(last.name, last.api), last.where or where, shown)
    elif where is not None and "synchronize" in where.text:
        found.add(Kind.EXPLICIT_SYNC, "torch.cuda.synchronize", where, shown)
    else:
        found.add(Kind.CAPTURE_FAILED, last.qualified if last is not None else "capture", where, shown)


def _escaped(first: Captured, found: Findings, home: Where | None, unsure: list[str]) -> None:
    """Whatever the device executed while the capture was under way is not in the graph."""
    if first.trace is None:
        unsure.append(f"work that escapes the capture could not be looked for: {profile.busy() or 'no trace'}")
        return
    allowed = 2
    for event in first.trace.executed:
        if OWN_KERNELS in event.name and allowed:
            allowed -= 1
            continue
        where = first.clock.at(first.trace.asked_at(event)) if first.clock is not None else None
        said = f"the device executed {event.name} while the capture was under way"
        found.add(Kind.ESCAPED, event.name.split("(")[0].split("<")[0], where or home, said)


class _Locator:
    """Finds the user line of a node: captures once more and counts the graph's nodes at each line."""

    def __init__(self, bench: Bench, args: Any) -> None:
        self._bench, self._args = bench, args
        self._clock: LineClock | None = None

    def __call__(self, node: Node) -> Where | None:
        home = where_defined(self._bench.eager)
        if self._bench.compiled:
            return home
        if self._clock is None:
            self._clock = LineClock(on_line=self._nodes_so_far)
            capture(self._bench, self._args, clock=self._clock)
        return self._clock.at(node.index) or home

    def _nodes_so_far(self) -> int:
        graph = graphwalk.capturing_graph(self._bench.capture_stream)
        return graphwalk.count_nodes(graph) if graph is not None else 0


def _nodes(
    bench: Bench, walked: Walk, lines: _Locator, args: Any, found: Findings, notes: list[str], unsure: list[str]
) -> None:
    """Judge each node by its kind."""
    for node in walked.nodes:
        if node.unread:
            unsure.append(f"{node} could not be read: {node.unread}")
        elif node.kind == "host":
            found.add(Kind.HOST_NODE, "host function", lines(node), f"{node} calls back into the CPU at every replay")
        elif node.kind == "memcpy":
            _copy_node(bench, node, lines, args, found, notes)
        elif node.kind in ("mem alloc", "mem free"):
            notes.append(f"{node}: the graph allocates for itself, outside torch's allocator")
        elif node.kind not in ("kernel", "memset", "empty", "child graph", "wait event", "event record"):
            unsure.append(f"{node} is of a kind that this tool does not judge")


def _copy_node(bench: Bench, node: Node, lines: _Locator, args: Any, found: Findings, notes: list[str]) -> None:
    source, target = node.source, node.target
    if source == "device" and target in ("pinned", "pageable"):
        where = lines(node)
        found.add(
            Kind.DEVICE_TO_HOST,
            _copy_name(bench, where),
            where,
            f"{node}: device to {target} memory; the host sees a stale view",
        )
    elif source == "pageable":
        where = lines(node)
        found.add(Kind.HOST_TO_DEVICE, _copy_name(bench, where), where, f"{node}: the source is pageable host memory")
    elif source == "pinned":
        held = [t for t in (*tensors(args), *bench.case.constants) if isinstance(t, torch.Tensor)]
        if any(t.device.type == "cpu" and _inside(node.addresses[0], t) for t in held):
            notes.append(f"{node}: each replay copies from a pinned buffer that the caller holds")
        else:
            where = lines(node)
            said = f"{node}: each replay copies from pinned memory that no argument and no constant holds"
            found.add(Kind.FROZEN_SOURCE, _copy_name(bench, where), where, said)


def _copy_name(bench: Bench, where: Where | None) -> str:
    """The name under which an earlier layer found the copy at this line, so that both are one finding."""
    crossing = (Kind.DEVICE_TO_HOST, Kind.HOST_TO_DEVICE)
    return next((f.operation for f in bench.found if f.where == where and f.kind in crossing), "memcpy")


def _inside(address: int, tensor: torch.Tensor) -> bool:
    storage = tensor.untyped_storage()
    return storage.data_ptr() <= address < storage.data_ptr() + max(storage.nbytes(), 1)


def _compare(
    bench: Bench,
    args: Any,
    first: Walk,
    lines: _Locator,
    found: Findings,
    evidence: list[str],
    unsure: list[str],
) -> None:
    """Captures of two sets of values, twice each: what differs with the data, and only with the data, is baked in."""
    walks: list[Walk] = [first]
    alive: list[Captured] = []  # freed pools would no longer be known as memory when their addresses are compared
    for seed, routing in [(1, ""), (0, ""), (1, ""), *((s, r) for _, s, r in bench.variants() if r)]:
        again = capture(bench, rebind(args, bench.maker.make(seed, routing)))
        if again.failed:
            why = again.error or again.end_error
            unsure.append(f"a second capture, with the values of seed {seed} {routing}, failed: {why}")
            return
        walks.append(graphwalk.walk(again.graph.raw_cuda_graph()))
        if len(alive) < 3:
            alive.append(again)
    rebind(args, bench.maker.make(0))
    one, two, one_again, two_again = walks[:4]
    repeat = _topology(one, one_again)
    if repeat is not None:
        said = f"two captures of the same inputs differ at {repeat}"
        found.add(Kind.BAKED_STATE, repeat.name or repeat.kind, lines(repeat), said)
        return
    for other in (two, *walks[4:]):
        differs = _topology(one, other)
        if differs is not None:
            said = f"captures of other data differ at {differs}"
            found.add(Kind.TOPOLOGY, differs.name or differs.kind, lines(differs), said)
            return
    for a, b, c, d in zip(one.nodes, two.nodes, one_again.nodes, two_again.nodes, strict=True):
        if a.params == b.params or len(a.params) != len(b.params):
            continue
        words = graphwalk.differing_words(a.params, b.params)
        steady = _changing(a.params, c.params) | _changing(b.params, d.params)
        data = [w for w in words if (w[0], w[1]) not in steady]
        if not data:
            continue
        position, offset, left, right = data[0]
        said = (
            f"{a}: parameter {position}, byte {offset}: {left.hex()} for one set of values, {right.hex()} for another"
        )
        if any(mark in a.name for mark in TORCH_KERNELS):
            evidence.append(
                f"{said}; torch's own kernels carry unused bytes, and their host values were compared by call"
            )
        else:
            found.add(Kind.BAKED_SCALAR, a.name, lines(a), said)


def _topology(a: Walk, b: Walk) -> Node | None:
    """The first node at which two graphs differ in anything but parameters; None when they do not."""
    for one, two in zip(a.nodes, b.nodes, strict=False):
        if one.shape != two.shape:
            return two
    if len(a.nodes) != len(b.nodes):
        longer = a if len(a.nodes) > len(b.nodes) else b
        return longer.nodes[min(len(a.nodes), len(b.nodes))]
    return a.nodes[0] if a.edges != b.edges else None


def _changing(a: tuple[bytes, ...], b: tuple[bytes, ...]) -> set[tuple[int, int]]:
    """Places that differ between two captures of the same values: not the data's doing."""
    if len(a) != len(b):
        return set()
    return {(position, offset) for position, offset, _, _ in graphwalk.differing_words(a, b)}
