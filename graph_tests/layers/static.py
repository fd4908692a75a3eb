"""Static layer: the callable is traced with fake cuda tensors, so that no GPU is needed, and every fault is found.

Sees what the dispatcher sees. Misses what happens inside an opaque operator (only its fake runs), inside a kernel,
behind a raw pointer, and everything that depends on real values.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_map

from graph_tests.case import Case
from graph_tests.cures import cure
from graph_tests.inputs import InputMaker
from graph_tests.layers import fakes
from graph_tests.layers.fake_cuda import device_guard, fake_inputs, modules_on_cuda, pretend_cuda
from graph_tests.layers.fake_trace import FakeApiNames, FakeTrace, TooManyReads, lists_of_fakes, no_triton_launch
from graph_tests.layers.oplog import OpLog
from graph_tests.source import where_raised
from graph_tests.verdict import Check, Finding, Kind, Status

REPEAT_BUDGET_S = 20.0


def check_static(case: Case, fn: Callable[..., Any], size: int | None) -> tuple[Check, tuple[str, ...]]:
    """The static check at one size, and the names of the opaque operators it met."""
    began = time.monotonic()
    maker = InputMaker(case, fn, size)
    guard = device_guard()
    fake = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    with modules_on_cuda(fn, fake):
        traces = [trace(fn, maker, 0, fake)]
        first = traces[0]
        if not first.error and time.monotonic() - began < REPEAT_BUDGET_S:
            traces += [trace(fn, maker, seed, fake) for seed in (0, 0, 1)]
    steady = traces[1] if len(traces) > 1 else first
    findings = list(steady.findings.values())
    notes = [*maker.notes(), *steady.notes]
    if len(traces) == 4:
        findings += compare(traces[1], traces[2], same_inputs=True)
        if not any(f.kind is Kind.BAKED_STATE for f in findings):
            findings += compare(traces[1], traces[3], same_inputs=False)
    findings += fakes.check_fakes(steady, case.mode, notes)
    evidence, why = [], ""
    if steady.error is not None:
        where = where_raised(steady.error)
        why = f"the trace ended at {where or 'an unknown line'}: {_first_line(steady.error)}"
        evidence.append(why)
        if guard:
            why = f"{guard}; {why}"
    status = Status.FAIL if findings else Status.INCONCLUSIVE if steady.error is not None else Status.PASS
    opaque = steady.opaque
    if opaque:
        notes.append(f"unproven by the static layer, because opaque: {', '.join(opaque)}")
    tagged = tuple(_with_size(f, size) for f in findings)
    check = Check("static", status, why if status is not Status.PASS else "", tagged, tuple(notes), tuple(evidence))
    return check, opaque


def trace(fn: Callable[..., Any], maker: InputMaker, seed: int, fake: FakeTensorMode) -> FakeTrace:
    """Run the callable once on fake cuda tensors and return the log."""
    made = maker.make(seed) if torch.cuda.is_available() else fake_inputs(lambda: maker.make(seed), fake)
    args, assumed = _to_fake(made, fake)
    api = FakeApiNames()
    log = FakeTrace(fake, api, args)
    api.trace = log
    if assumed:
        log.notes.append("no input was on cuda and this machine has no GPU: CPU inputs stand for GPU tensors")
    try:
        with contextlib.ExitStack() as stack:
            for context in (torch.no_grad(), pretend_cuda(log.heard_sync), no_triton_launch(log), lists_of_fakes(log)):
                stack.enter_context(context)
            for mode in (fake, api, log):
                stack.enter_context(mode)
            fn(*args)
    except TooManyReads as error:
        log.notes.append(str(error))
    except Exception as error:
        log.error = error
        if log.raw_pointer is not None:
            log.notes.append(f"{log.raw_pointer} takes a raw pointer: what is done with it is not seen")
    return log


def _to_fake(args: Any, fake: FakeTensorMode) -> tuple[Any, bool]:
    from torch._subclasses.fake_tensor import FakeTensor

    leaves: list[torch.Tensor] = []
    tree_map(lambda leaf: leaves.append(leaf) if isinstance(leaf, torch.Tensor) else None, args)
    assume = not torch.cuda.is_available() and not any(t.device.type == "cuda" for t in leaves)

    def convert(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or isinstance(leaf, FakeTensor):
            return leaf
        if leaf.device.type == "cuda":
            return fake.from_tensor(leaf.detach(), static_shapes=True)
        if assume and leaf.dim():
            with fake:
                return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="cuda")
        return leaf

    return tree_map(convert, args), assume and any(t.dim() for t in leaves)


def compare(one: OpLog, two: OpLog, same_inputs: bool) -> list[Finding]:
    """Host values that differ between two traces: a graph would keep the first for ever."""
    kind = Kind.BAKED_STATE if same_inputs else Kind.BAKED_SCALAR
    what = "two calls on the same inputs" if same_inputs else "two sets of inputs"
    if [op.name for op in one.ops] != [op.name for op in two.ops]:
        index = next(
            (i for i, (a, b) in enumerate(zip(one.ops, two.ops, strict=False)) if a.name != b.name),
            min(len(one.ops), len(two.ops)),
        )
        log = one if index < len(one.ops) else two
        op = log.ops[index] if index < len(log.ops) else None
        kind = Kind.BAKED_STATE if same_inputs else Kind.TOPOLOGY
        evidence = (
            f"{what} dispatch {len(one.ops)} and {len(two.ops)} operations; the first difference is operation {index}"
        )
        return [Finding(kind, op.qualified if op else "?", op.where if op else None, evidence, cure(kind))]
    found = []
    for a, b in zip(one.ops, two.ops, strict=True):
        if a.grid != b.grid:
            grid_kind = Kind.BAKED_STATE if same_inputs else Kind.TOPOLOGY
            evidence = f"{what} launch {a.qualified} with the grids {a.grid} and {b.grid}"
            found.append(Finding(grid_kind, a.qualified, a.where, evidence, cure(grid_kind)))
            continue
        if a.scalars != b.scalars and not _both_nan(a.scalars, b.scalars):
            evidence = f"{what} give {a.qualified} the host values {a.scalars} and {b.scalars}"
            found.append(Finding(kind, a.qualified, a.where, evidence, cure(kind)))
    return found[:5]


def _both_nan(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    return repr(a) == repr(b)


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or '(no text)').splitlines()[0][:160]}"


def _with_size(finding: Finding, size: int | None) -> Finding:
    return dataclasses.replace(finding, size=size)
