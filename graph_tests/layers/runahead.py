"""Run-ahead layer: while a gate kernel holds the stream, the call must return.

This is the definition of "never makes the CPU wait", tested directly. It cannot hang: the gate ends at a deadline of
its own. A call that queues more than about a thousand launches blocks legitimately, because the launch queue is full;
then nothing can be told.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import torch

from graph_tests.inputs import clone_tree
from graph_tests.layers.bench import Bench
from graph_tests.layers.findings import Findings
from graph_tests.layers.gate import EXPIRED, Gate
from graph_tests.source import user_where, where_defined
from graph_tests.verdict import Check, Kind, Status, Where

LIMITS_S = (0.3, 1.2, 4.0)
WAITS = (Kind.HOST_READ, Kind.DATA_SHAPE, Kind.HOST_CHECK, Kind.EXPLICIT_SYNC, Kind.HOST_TO_DEVICE)
MOST_LAUNCHES = 1000


def check_runahead(bench: Bench) -> Check:
    """Hold the caller's stream, the legacy default stream, and each stream the callable uses; call each time."""
    if bench.broken:
        return bench.skip("run-ahead", bench.broken)
    if bench.launches is None:
        why = "the number of launches is not known, because no profile was made"
        return Check("run-ahead", Status.INCONCLUSIVE, why)
    if bench.launches > MOST_LAUNCHES:
        why = f"one call queues {bench.launches:,} launches: beyond {MOST_LAUNCHES:,} the launch queue itself may block"
        return Check("run-ahead", Status.INCONCLUSIVE, why)
    found = Findings()
    evidence = []
    gate = Gate()
    try:
        targets = {"the caller's stream": bench.stream.cuda_stream, "the legacy default stream": 0}
        others = sorted(bench.streams - set(targets.values()))
        targets |= {f"side stream {i}": handle for i, handle in enumerate(others[:4], 1)}
        for name, handle in targets.items():
            returned, took, where = _held_call(bench, gate, handle)
            said = "returned" if returned else "did not return"
            evidence.append(f"{name} held: the call {said}, {took * 1e3:.2f} ms")
            if not returned:
                said = f"with {name} held the call returned only when the gate ended by itself, after {took:.1f} s"
                found.add(Kind.CALL_WAITS, "call", where or where_defined(bench.eager), said)
                break
    finally:
        gate.close()
    if found and bench.has(*WAITS):
        why = "the call waits for the device, at what the run-time layer found"
        return Check("run-ahead", Status.FAIL, why, evidence=(*evidence, *(f.evidence for f in found.tuple())))
    return Check("run-ahead", Status.FAIL if found else Status.PASS, "", found.tuple(), evidence=tuple(evidence))


def _held_call(bench: Bench, gate: Gate, stream: int) -> tuple[bool, float, Where | None]:
    """Whether the call returned while the stream was held, how long it took, and where it was seen waiting.

    A slow machine can let the deadline pass without any wait: then the deadline is made longer and it is tried again.
    """
    took, where = 0.0, None
    limits = LIMITS_S[:1] if bench.has(*WAITS) else LIMITS_S
    for limit in limits:
        args = clone_tree(bench.maker.make(0))
        torch.cuda.synchronize()
        watch = _Watch(limit * 0.6)
        with watch:
            gate.hold(stream, limit)
            began = time.perf_counter()
            out: Any = bench.run(args)
            took = time.perf_counter() - began
            held = gate.state != EXPIRED
        gate.open()
        del out
        if held:
            return True, took, None
        where = watch.seen or where
    return False, took, where


class _Watch:
    """Looks once, from another thread, at the line where the calling thread stands after a delay."""

    def __init__(self, delay_s: float) -> None:
        self.seen: Where | None = None
        self._target = threading.get_ident()
        self._timer = threading.Timer(delay_s, self._look)
        self._timer.daemon = True

    def _look(self) -> None:
        frame = sys._current_frames().get(self._target)
        if frame is not None:
            self.seen = user_where(frame)

    def __enter__(self) -> _Watch:
        self._timer.start()
        return self

    def __exit__(self, *args: object) -> None:
        self._timer.cancel()
