"""Run-time layer: eager calls in the steady state, with every listener for waits, copies and allocations.

Misses waits on the host that ask the driver nothing (a spin on pinned memory): run-ahead sees those.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from graph_tests.inputs import clone_tree
from graph_tests.layers import profile
from graph_tests.layers.bench import Bench, raw_stream
from graph_tests.layers.findings import Findings
from graph_tests.layers.lines import LineClock
from graph_tests.layers.listeners import explicit_syncs, sync_warnings
from graph_tests.layers.oplog import ApiNames, Op, OpLog
from graph_tests.layers.optable import api_name, operation_name
from graph_tests.layers.static import compare
from graph_tests.source import where_defined
from graph_tests.verdict import Check, Kind, Status, Where

GROWTH_CALLS = 10
QUIET_CALLS, MOST_WARM_CALLS = 3, 45
COUNTERS = ("num_device_alloc", "num_device_free", "num_sync_all_streams", "num_alloc_retries", "num_ooms")
_MADE_FROM_HOST = ("tensor", "as_tensor", "asarray", "from_numpy", "to", "cuda")


def check_runtime(bench: Bench) -> Check:
    """Waits, copies, allocations and growth of the callable in its steady state."""
    if bench.broken:
        return bench.skip("run time", bench.broken)
    found = Findings()
    evidence: list[str] = []
    logs = [_listen(bench, seed, found) for seed in (0, 0, 1, 1)]
    bench.streams |= {op.stream for log in logs for op in log.ops}
    _values(logs, found)
    _explicit(bench, found)
    _allocator(bench, found, evidence)
    why_not = profile.busy()
    if not why_not:
        _profile(bench, found, evidence)
    _growth(bench, found, evidence)
    notes = tuple(bench.maker.notes())
    if found:
        return Check("run time", Status.FAIL, "", found.tuple(), notes, tuple(evidence))
    if why_not:
        return Check("run time", Status.NOT_RUN, why_not, notes=notes, evidence=tuple(evidence))
    return Check("run time", Status.PASS, "", notes=notes, evidence=tuple(evidence))


def _listen(bench: Bench, seed: int, found: Findings) -> OpLog:
    """One logged eager call in which torch warns about each of its own waits; then, compiled, the same unlogged."""
    args = clone_tree(bench.maker.make(seed))
    torch.cuda.synchronize()
    api, mine = ApiNames(), Findings()
    log = OpLog(api, args, stream_of=raw_stream)
    bench.stream.wait_stream(torch.cuda.current_stream())

    def heard(message: str, where: Where | None) -> None:
        kind, operation = _blame(api, log, log.current)
        mine.add(kind, operation, where or where_defined(bench.eager), f"{operation}: torch says: {message}")

    with sync_warnings(heard), torch.no_grad(), torch.cuda.stream(bench.stream), bench.logging(api, log):
        bench.eager(*args)
    torch.cuda.synchronize()
    for op in log.ops:
        if op.kind in (Kind.DEVICE_TO_HOST, Kind.HOST_TO_DEVICE) and not op.pinned_source and not mine.at(op.where):
            evidence = f"aten::{op.name} crosses between host and device"
            mine.add(op.kind, operation_name(op.name, op.api), op.where, evidence)
    if bench.compiled:
        fresh = clone_tree(bench.maker.make(seed))
        torch.cuda.synchronize()
        with sync_warnings(lambda message, where: mine.add(Kind.HOST_READ, "compiled call", where, message)):
            bench.run(fresh)
        torch.cuda.synchronize()
    found.extend(list(mine.tuple()))
    return log


def _blame(api: ApiNames, log: OpLog, op: Op | None) -> tuple[Kind, str]:
    """Which operation a wait belongs to, and its kind."""
    if op is not None:
        kind = op.kind if op.kind is not None else Kind.HOST_READ
        return kind, op.qualified if op.custom else operation_name(op.name, op.api)
    name = api_name(api.current)
    if name in _MADE_FROM_HOST:
        return Kind.HOST_TO_DEVICE, name
    return Kind.HOST_READ, name or "unknown operation"


def _values(logs: list[OpLog], found: Findings) -> None:
    """Host values that change between calls, or with the data."""
    state = compare(logs[0], logs[1], same_inputs=True)
    found.extend(state)
    if not state:
        # The second call on each set of inputs: what was read late then belongs to the same inputs.
        found.extend(compare(logs[1], logs[3], same_inputs=False))


def _explicit(bench: Bench, found: Findings) -> None:
    args = clone_tree(bench.maker.make(0))
    torch.cuda.synchronize()
    new = Findings()

    def heard(name: str, where: Where | None) -> None:
        if not found.at(where):
            evidence = f"torch's trace callback heard {name}"
            new.add(Kind.EXPLICIT_SYNC, name, where or where_defined(bench.eager), evidence)

    with explicit_syncs(heard):
        bench.run(args)
    torch.cuda.synchronize()
    found.extend(list(new.tuple()))


def _allocator(bench: Bench, found: Findings, evidence: list[str]) -> None:
    """The allocators must ask the driver for nothing once warm: a callable may use up to 32 pooled streams in turn."""
    args = clone_tree(bench.maker.make(0))
    quiet, calls = 0, 0
    moved: dict[str, int] = {}
    while quiet < QUIET_CALLS and calls < MOST_WARM_CALLS:
        torch.cuda.synchronize()
        before = _counters()
        bench.run(args)
        torch.cuda.synchronize()
        calls += 1
        now = {k: v - before[k] for k, v in _counters().items() if v != before[k]}
        quiet, moved = (0, now) if now else (quiet + 1, moved)
    evidence.append(f"allocator counters were quiet after {calls - quiet} calls; last moves: {moved or 'none'}")
    if quiet < QUIET_CALLS:
        where = where_defined(bench.eager)
        said = f"after {calls} calls a call still moves {moved}"
        found.add(Kind.DEVICE_ALLOCATION, "caching allocator", where, said)


def _counters() -> dict[str, int]:
    stats = torch.cuda.memory_stats()
    counters = {k: int(stats[k]) for k in COUNTERS if k in stats}
    with contextlib.suppress(AttributeError):
        host = torch.cuda.host_memory_stats()
        counters |= {k: int(host[k]) for k in ("num_host_alloc", "num_host_free") if k in host}
    return counters


def _profile(bench: Bench, found: Findings, evidence: list[str]) -> None:
    """What the CUDA runtime was asked during one call; lines come from a line tracer run at the same time."""
    args = clone_tree(bench.maker.make(0))
    torch.cuda.synchronize()
    clock = None if bench.compiled else LineClock()
    trace = profile.profiled(lambda: _clocked(bench, args, clock))
    bench.launches = trace.launches
    names = sorted({e.name for e in trace.calls})
    evidence.append(f"{trace.launches} launches; calls: {', '.join(names)[:600]}")
    home = where_defined(bench.eager)
    new = Findings()
    for event in trace.calls:
        where = (clock.at(event.begin) if clock is not None else None) or home
        if found.at(where) and clock is not None:
            continue
        custom = trace.custom_op_at(event.begin)
        if event.name in profile.HOST_WAITS:
            operation = custom or profile.HOST_WAITS[event.name]
            kind = Kind.HOST_READ if custom else Kind.EXPLICIT_SYNC
            new.add(kind, operation, where, f"the driver was asked to wait: {event.name}, {event.duration_us:.0f} us")
        elif event.name in profile.ALLOCATIONS:
            new.add(Kind.DEVICE_ALLOCATION, custom or event.name, where, f"{event.name} in a warm call")
    for event in trace.executed:
        if event.category != "gpu_memcpy":
            continue
        mark = trace.asked_at(event)
        where = (clock.at(mark) if clock is not None else None) or home
        if (found.at(where) and clock is not None) or new.at(where):
            continue
        operation = trace.custom_op_at(mark) or "memcpy"
        if "DtoH" in event.name:
            new.add(Kind.DEVICE_TO_HOST, operation, where, f"the device executed {event.name}")
        elif "HtoD" in event.name and "Pinned" not in event.name:
            new.add(Kind.HOST_TO_DEVICE, operation, where, f"the device executed {event.name}")
    found.extend(list(new.tuple()))


def _clocked(bench: Bench, args: Any, clock: LineClock | None) -> None:
    with clock if clock is not None else contextlib.nullcontext():
        bench.run(args)


def _growth(bench: Bench, found: Findings, evidence: list[str]) -> None:
    """Memory that each call keeps."""
    args = clone_tree(bench.maker.make(0))
    levels = []
    for _ in range(3):
        for _ in range(GROWTH_CALLS):
            bench.run(args)
        torch.cuda.synchronize()
        levels.append(torch.cuda.memory_allocated())
    evidence.append(f"bytes allocated after 10, 20, 30 calls: {levels}")
    if levels[0] < levels[1] < levels[2]:
        kept = (levels[2] - levels[0]) // (2 * GROWTH_CALLS)
        found.add(Kind.MEMORY_GROWTH, "call", where_defined(bench.eager), f"each call keeps about {kept:,} bytes")
