"""Compile layer: torch.compile(mode="reduce-overhead") must really have recorded graphs, and replay them alone.

Inductor can capture nothing without a word: its skip counter stays at zero when a graph is partitioned around an
operator. So recorded graphs are counted, and one call is profiled.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch._dynamo

from graph_tests.inputs import clone_tree, tensors
from graph_tests.layers import profile
from graph_tests.layers.bench import Bench
from graph_tests.layers.findings import Findings
from graph_tests.layers.tolerance import difference, spread
from graph_tests.source import where_defined, where_raised
from graph_tests.verdict import Check, Kind, Status

SEED = 1234
CALLS = 4
GROWTH_CALLS = 50
RANDOM_STATE = 2  # torch fills the seed and the offset of a generator before each replay


def check_compiled(bench: Bench) -> Check:
    """Compile, call, and look at what Inductor did."""
    found = Findings()
    evidence: list[str] = []
    unsure: list[str] = []
    home = where_defined(bench.eager)
    reasons: list[str] = []
    before = _counters()
    with _skip_reasons(reasons):
        try:
            states = [_step(bench, seed=0) for _ in range(CALLS)]
        except torch._dynamo.exc.Unsupported as error:
            bench.broken = "it does not compile in one piece"
            text = " ".join(str(error).split())[:240]
            found.add(Kind.GRAPH_BREAK, "torch.compile", where_raised(error) or home, text)
            return Check("compile", Status.FAIL, "", found.tuple())
    moved = {k: v - before.get(k, 0) for k, v in _counters().items() if v != before.get(k, 0)}
    recorded = _recorded()
    evidence.append(f"recorded graphs {recorded}; states after each call {states}; counters {moved}")
    if reasons or moved.get("cudagraph_skips"):
        reason = reasons[0] if reasons else "no reason given"
        found.add(Kind.CUDAGRAPH_SKIPPED, "torch.compile", home, f"Inductor: {' '.join(reason.split())[:240]}")
    elif recorded == 0:
        found.add(Kind.CUDAGRAPH_SKIPPED, "torch.compile", home, "0 recorded graphs, although nothing was raised")
    elif moved.get("cudagraph_partitions"):
        count = moved["cudagraph_partitions"]
        found.add(Kind.CUDAGRAPH_SKIPPED, "torch.compile", home, f"the graph was cut into {count} partitions")
    elif states[2] != "EXECUTION":
        found.add(Kind.CUDAGRAPH_SKIPPED, "torch.compile", home, f"the third call was {states[2]}, not EXECUTION")
    bench.call(bench.capture_fn, clone_tree(bench.maker.make(0)))  # its own first compilation is no recompile
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    _values(bench, found)
    more = torch._dynamo.utils.counters["stats"]["unique_graphs"] - graphs
    if more:
        found.add(
            Kind.RECOMPILE,
            "torch.compile",
            home,
            f"{more} more graphs were compiled for other values of the same shapes",
        )
    if not found:
        _only_a_graph(bench, found, evidence, unsure)
    _growth(bench, found, evidence)
    status = Status.FAIL if found else Status.INCONCLUSIVE if unsure else Status.PASS
    return Check("compile", status, "; ".join(unsure), found.tuple(), evidence=tuple(evidence))


def _step(bench: Bench, seed: int) -> str:
    """One call as a step of its own, its outputs dropped; the state of the graph tree after it."""
    out = bench.run(clone_tree(bench.maker.make(seed)))
    torch.cuda.synchronize()
    state = _state()
    del out
    return state


def _manager() -> Any:
    from torch._inductor import cudagraph_trees

    return cudagraph_trees.get_manager(torch.cuda.current_device(), create_if_none_exists=False)


def _state() -> str:
    manager = _manager()
    return str(getattr(manager.path_state, "name", manager.path_state)) if manager is not None else "NO TREE"


def _recorded() -> int:
    """Nodes of the graph tree: one for each recorded CUDA graph."""
    manager = _manager()
    if manager is None:
        return 0
    pending, count = list(manager.get_roots()), 0
    while pending:
        node = pending.pop()
        count += 1
        for children in node.children.values():
            pending += children
    return count


def _counters() -> dict[str, int]:
    inductor = torch._dynamo.utils.counters["inductor"]
    return {k: int(inductor[k]) for k in ("cudagraph_skips", "cudagraph_partitions") if k in inductor}


@contextlib.contextmanager
def _skip_reasons(reasons: list[str]) -> Iterator[None]:
    """Context: what Inductor says when it gives up on CUDA graphs."""
    import importlib

    name = "log_cudagraph_skip_and_bump_counter"
    with contextlib.ExitStack() as stack:
        for place in ("cudagraph_utils", "output_code", "cudagraph_trees", "compile_fx", "codecache"):
            module = importlib.import_module(f"torch._inductor.{place}")
            real = getattr(module, name, None)
            if real is None:
                continue

            def heard(message: str, real: Any = real) -> Any:
                reasons.append(str(message))
                return real(message)

            stack.enter_context(mock.patch.object(module, name, heard))
        yield


def _values(bench: Bench, found: Findings) -> None:
    """Other values of the same shapes, against the same compiled code without CUDA graphs."""
    home = where_defined(bench.eager)
    for name, seed, routing in [("seed 0", 0, ""), *bench.variants()]:
        values = bench.maker.make(seed, routing)
        expected = []
        for _ in range(2):
            torch.cuda.manual_seed_all(SEED)
            expected.append(clone_tree(bench.call(bench.capture_fn, clone_tree(values))))
            torch.cuda.synchronize()
        torch.cuda.manual_seed_all(SEED)
        got = clone_tree(bench.run(clone_tree(values)))
        torch.cuda.synchronize()
        differs = difference(expected[0], got, spread(expected))
        if differs is not None:
            said = f"{name}: compiled without graphs against compiled with them, {differs}"
            found.add(Kind.WRONG_REPLAY, "torch.compile", home, said)
            return


def _only_a_graph(bench: Bench, found: Findings, evidence: list[str], unsure: list[str]) -> None:
    """In the steady state a call is input copies and one graph launch, and nothing else."""
    if profile.busy():
        unsure.append(profile.busy())
        return
    home = where_defined(bench.eager)
    args = clone_tree(bench.maker.make(0))
    torch.cuda.synchronize()
    trace = profile.profiled(lambda: bench.run(args))
    order = [e.name for e in sorted(trace.calls, key=lambda e: e.begin)]
    graphs = [i for i, n in enumerate(order) if n.startswith(("cudaGraphLaunch", "cuGraphLaunch"))]
    launches = [i for i, n in enumerate(order) if n.startswith(profile.LAUNCHES)]
    copies = len(tensors(args))
    evidence.append(
        f"steady call: {len(graphs)} graph launches, {len(launches)} kernel launches, {copies} input tensors"
    )
    if not graphs:
        found.add(Kind.CUDAGRAPH_SKIPPED, "torch.compile", home, "a profiled call launched no graph")
    elif len([i for i in launches if i < graphs[-1]]) > copies + RANDOM_STATE or any(i > graphs[-1] for i in launches):
        said = f"{len(launches)} kernels were launched beside the graph, more than the {copies} input copies explain"
        found.add(Kind.CUDAGRAPH_SKIPPED, "torch.compile", home, said)


def _growth(bench: Bench, found: Findings, evidence: list[str]) -> None:
    levels = []
    for _ in range(3):
        for _ in range(GROWTH_CALLS):
            bench.run(clone_tree(bench.maker.make(0)))
        torch.cuda.synchronize()
        levels.append(torch.cuda.memory_allocated())
    evidence.append(f"bytes allocated after 50, 100, 150 calls: {levels}")
    if levels[0] < levels[1] < levels[2]:
        said = f"bytes allocated after 50, 100, 150 calls: {levels}"
        found.add(Kind.MEMORY_GROWTH, "torch.compile", where_defined(bench.eager), said)
