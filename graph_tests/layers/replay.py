"""Replay layer: replays against eager calls, with other data, poisoned memory and other graphs around.

Misses faults that show only beyond the seeds, routings and sizes that were tried; these are part of the verdict.
"""

from __future__ import annotations

import gc
import time
from typing import Any

import torch

from graph_tests.inputs import clone_tree, tensors
from graph_tests.layers import memory
from graph_tests.layers.bench import Bench, rebind, static_args
from graph_tests.layers.capture import Captured, capture
from graph_tests.layers.findings import Findings
from graph_tests.layers.oplog import External, Op
from graph_tests.layers.tolerance import Difference, difference, same_bits, spread
from graph_tests.source import where_defined
from graph_tests.verdict import Check, Kind, Status, Where

MANY = 1000
MANY_BUDGET_S = 5.0
SEED = 1234
MOST_WEIGHT_BYTES = 2 << 30
_CAUSES = (Kind.BAKED_SCALAR, Kind.BAKED_STATE, Kind.TOPOLOGY, Kind.DEVICE_TO_HOST, Kind.FROZEN_SOURCE, Kind.ESCAPED)


def check_replay(bench: Bench) -> Check:
    """Run the whole battery on one graph."""
    if bench.broken:
        return bench.skip("replay", bench.broken)
    if bench.has(Kind.HOST_NODE):
        return bench.skip("replay", "the graph calls back into the CPU")
    battery = _Battery(bench)
    battery.run()
    found = battery.found
    status = Status.FAIL if found else Status.INCONCLUSIVE if battery.unsure else Status.PASS
    why = "; ".join(battery.unsure[:2])
    return Check("replay", status, why, found.tuple(), tuple(battery.notes), tuple(battery.evidence))


class _Battery:
    """One captured graph and everything that is tried on it."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.found = Findings()
        self.notes: list[str] = []
        self.evidence: list[str] = []
        self.unsure: list[str] = []
        self.home = where_defined(bench.eager)
        self.args = static_args(bench.args)
        # Warm on these very buffers, so that what is cached by address is cached before the capture.
        bench.call(bench.capture_fn, self.args)
        self.args = rebind(self.args, self.values(0))
        self.graph: Captured = capture(bench, self.args, logged=True)
        self.log = self.graph.log if self.graph.log is not None else bench.logged(self.args)
        self.noise: list[float] = []

    def run(self) -> None:
        """All trials; each adds findings, and a trial that another one spoils is left out."""
        if self.graph.failed:
            self.unsure.append(f"a capture for replay failed: {self.graph.error or self.graph.end_error}")
            return
        self._dead()
        if self.found.has(Kind.DEAD_INPUT):
            return
        repeatable = self._repeatable()
        self._alias()
        if not repeatable:
            return
        self._variants()
        if self.found:
            return
        self._back_and_forth()
        self._weights()
        self._shared_pool()
        self._many()

    def values(self, seed: int, routing: str = "") -> Any:
        """Fresh arguments."""
        return self.bench.maker.make(seed, routing)

    def eager(self, values: Any) -> tuple[Any, Any]:
        """Outputs of an eager call on clones, and the clones as the call left them."""
        args = clone_tree(values)
        torch.cuda.synchronize()
        torch.cuda.manual_seed_all(SEED)
        out = self.bench.call(self.bench.capture_fn, args)
        torch.cuda.synchronize()
        return clone_tree(out), args

    def replay(self, values: Any, byte: int | None = memory.NANS) -> Any:
        """Refill the static buffers, poison the pool, replay; copies of the outputs."""
        rebind(self.args, values)
        if byte is not None:
            memory.poison(memory.pool_ranges(self.graph.graph.pool()), byte)
        torch.cuda.synchronize()
        torch.cuda.manual_seed_all(SEED)
        self.graph.graph.replay()
        torch.cuda.synchronize()
        return clone_tree(self.graph.out)

    def _repeatable(self) -> bool:
        """The same inputs again, in replay and eagerly: state that outlives a call, or memory never written."""
        values = self.values(0)
        replays = [self.replay(values) for _ in range(3)]
        moves = _moves(replays)
        if moves is not None:
            op = self._writer()
            said = f"two replays on the same inputs differ: {moves}"
            self.found.add(Kind.NOT_IDEMPOTENT, op.qualified if op else "replay", op.where if op else self.home, said)
            return False
        moves = _moves([replays[0], self.replay(values, memory.SMALL)])
        if moves is not None:
            drift = _moves([replays[0], self.replay(values)])
            if drift is not None:  # the first poison again, and still another result: it is not the poison
                said = f"replays on the same inputs drift, each a little further: {drift}"
                self.found.add(Kind.NOT_IDEMPOTENT, "replay", self.home, said)
                return False
            said = f"the result changes with what was in the graph's memory before: {moves}"
            self.evidence.append(said)
            if not self.bench.has(Kind.ESCAPED):  # what escaped the capture is missing from the replay: one story
                self.found.add(Kind.UNINITIALISED, "replay", self.home, said)
            return False
        eager = [self.eager(values)[0] for _ in range(3)]
        eager_moves = _moves(eager)
        if eager_moves is not None:
            said = f"two eager calls on the same inputs differ, replays do not: {eager_moves}"
            if not self.bench.has(Kind.BAKED_STATE):
                self.found.add(Kind.BAKED_STATE, "call", self.home, said)
            self.evidence.append(said)
            return False
        self.noise = [max(a, b) for a, b in zip(spread(eager), spread(replays), strict=True)]
        if any(self.noise):
            self.evidence.append(f"the callable's own spread over equal calls: {self.noise}")
        return True

    def _writer(self) -> Op | None:
        """The operation that writes memory from outside the callable."""
        written = {key for key, e in self.log.externals.items() if e.written}
        return next((op for op in self.log.ops if written & set(op.writes)), None)

    def _alias(self) -> None:
        """An earlier output that the next call overwrites."""
        first = self.bench.call(self.bench.capture_fn, clone_tree(self.values(0)))
        torch.cuda.synchronize()
        before = clone_tree(first)
        second = self.bench.call(self.bench.capture_fn, clone_tree(self.values(1)))
        torch.cuda.synchronize()
        shared = {t.untyped_storage().data_ptr() for t in tensors(second) if t.numel()}
        for now, then in zip(tensors(first), tensors(before), strict=True):
            if now.untyped_storage().data_ptr() in shared and not same_bits(now, then):
                op = self._writer()
                said = "the output of one call was overwritten by the next: both are views of the same memory"
                self.found.add(Kind.OUTPUT_ALIAS, op.qualified if op else "return", op.where if op else self.home, said)
                return

    def _dead(self) -> None:
        """Tensors that the graph reads and nobody keeps; all free memory is then overwritten."""
        self.eager(self.values(1))
        gc.collect()
        torch.cuda.synchronize()
        for external in self.log.externals.values():
            if external.device == "cuda" and not external.alive():
                said = f"a tensor of shape {external.shape} that the graph reads was freed after the capture"
                self.found.add(Kind.DEAD_INPUT, external.op.qualified, external.op.where, said)
        memory.poison(memory.free_ranges())

    def _variants(self) -> None:
        """Other values and other routings, against eager calls; inputs must be left alone."""
        for name, seed, routing in [("seed 0", 0, ""), *self.bench.variants()]:
            values = self.values(seed, routing)
            expected, left = self.eager(values)
            self._untouched(values, left)
            got = self.replay(values)
            moves = _moves([got, self.replay(values, memory.SMALL)])
            if moves is not None:
                said = f"{name}: the result changes with what was in the graph's memory before: {moves}"
                self.found.add(Kind.UNINITIALISED, "replay", self.home, said)
                continue
            differs = difference(expected, got, self.noise) or difference(left, self.args, None)
            if differs is None:
                continue
            said = f"{name}: eager against replay, {differs}"
            self.evidence.append(said)
            if self.bench.has(*_CAUSES):
                continue
            self.found.add(Kind.WRONG_REPLAY, "replay", self.home, said)
        tried = [name for name, _, _ in self.bench.variants()]
        self.evidence.append(f"replayed with seed 0 and {', '.join(tried)}")

    def _untouched(self, values: Any, left: Any) -> None:
        for position, (was, now, static) in enumerate(
            zip(tensors(values), tensors(left), tensors(self.args), strict=True)
        ):
            if same_bits(was, now):
                continue
            declared = self.log.declared_writes(static)
            if declared is not None:
                self.notes.append(f"tensor {position} of the inputs is written in place by {declared.qualified}")
            else:
                op, where = self._undeclared()
                said = f"tensor {position} of the inputs changed, and no operator declares that it writes it"
                self.found.add(Kind.MUTATION, op, where, said)

    def _undeclared(self) -> tuple[str, Where | None]:
        known = next((f for f in self.bench.found if f.kind is Kind.MUTATION), None)
        if known is not None:
            return known.operation, known.where
        custom = next((op for op in self.log.ops if op.custom), None)
        return (custom.qualified, custom.where) if custom is not None else ("call", self.home)

    def _back_and_forth(self) -> None:
        """A, B, A: the last result must be the first."""
        a, b = self.values(0), self.values(1)
        first = self.replay(a)
        self.replay(b)
        differs = difference(first, self.replay(a), self.noise)
        if differs is not None:
            said = f"inputs A, B, A: the last replay is not the first: {differs}"
            self.found.add(Kind.NOT_IDEMPOTENT, "replay", self.home, said)

    def _weights(self) -> None:
        """Weights changed in place must be followed."""
        weights = self._weight_tensors()
        if not weights:
            return
        kept = [w.detach().clone() for _, w in weights]
        values = self.values(0)
        try:
            with torch.no_grad():
                for _, weight in weights:
                    weight.mul_(0.5)
            expected, _ = self.eager(values)
            differs = difference(expected, self.replay(values), self.noise)
        finally:
            with torch.no_grad():
                for (_, weight), value in zip(weights, kept, strict=True):
                    weight.copy_(value)
            torch.cuda.synchronize()
        if differs is not None:
            external = weights[0][0]
            said = f"after {len(weights)} weights were halved in place, eager and replay differ: {differs}"
            self.found.add(Kind.STALE_WEIGHTS, external.op.qualified, external.op.where, said)
        count = len(self.log.externals)
        self.notes.append(
            f"the graph reads {count} tensors that are no arguments, by address: update them in place, never rebind"
        )

    def _weight_tensors(self) -> list[tuple[External, torch.Tensor]]:
        found, total = [], 0
        for external in self.log.externals.values():
            tensor = external.tensor()
            if tensor is None or external.written or tensor.device.type != "cuda":
                continue
            if any(tensor is c for c in self.bench.case.constants) or tensor.dtype not in _FLOATS:
                continue
            total += tensor.numel() * tensor.element_size()
            if total > MOST_WEIGHT_BYTES:
                self.notes.append("not all weights were changed in place: more than 2 GiB of them")
                break
            found.append((external, tensor))
        return found

    def _shared_pool(self) -> None:
        """Two graphs in one pool, replayed in both orders."""
        other_args = static_args(self.values(1))
        other = capture(self.bench, other_args, pool=self.graph.graph.pool())
        if other.failed:
            self.unsure.append(f"a second capture into the same pool failed: {other.error or other.end_error}")
            return
        values = [self.values(0), self.values(1)]
        expected = [self.eager(v)[0] for v in values]
        for order in ((0, 1), (1, 0)):
            rebind(self.args, values[0])
            rebind(other_args, values[1])
            torch.cuda.synchronize()
            for which in order:
                torch.cuda.manual_seed_all(SEED)
                (self.graph, other)[which].graph.replay()
            torch.cuda.synchronize()
            got = [clone_tree(self.graph.out), clone_tree(other.out)]
            for which in (0, 1):
                differs = difference(expected[which], got[which], self.noise)
                if differs is not None:
                    said = f"two graphs in one pool, replayed in order {order}: graph {which} is wrong, {differs}"
                    self.found.add(Kind.WRONG_REPLAY, "shared pool", self.home, said)
                    return

    def _many(self) -> None:
        """A thousand replays without growth, and still right."""
        values = self.values(0)
        expected, _ = self.eager(values)
        rebind(self.args, values)
        torch.cuda.synchronize()
        before = (torch.cuda.memory_allocated(), torch.cuda.memory_reserved())
        began, done = time.monotonic(), 0
        while done < MANY and time.monotonic() - began < MANY_BUDGET_S:
            self.graph.graph.replay()
            done += 1
            if done % 50 == 0:
                torch.cuda.synchronize()
        torch.cuda.synchronize()
        after = (torch.cuda.memory_allocated(), torch.cuda.memory_reserved())
        self.evidence.append(f"{done} replays: allocated and reserved bytes {before} before, {after} after")
        if after[0] > before[0] or after[1] > before[1]:
            self.found.add(Kind.MEMORY_GROWTH, "replay", self.home, self.evidence[-1])
        differs = difference(expected, self.replay(values), self.noise)
        if differs is not None:
            self.found.add(
                Kind.NOT_IDEMPOTENT, "replay", self.home, f"after {done} replays the result changed: {differs}"
            )


_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _moves(results: list[Any]) -> Difference | None:
    """A difference among results of the same call that is too large to be the noise of atomics."""
    for other in results[1:]:
        differs = difference(results[0], other, None)
        if differs is not None and differs.moved:
            return differs
    return None
