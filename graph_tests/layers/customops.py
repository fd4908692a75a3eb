"""Custom-operator layer: each operator met is run on real tensors beside its schema and its fake.

torch.library.opcheck is run too. It passes operators that wait, fakes that specialise and results cached by pointer:
necessary, not sufficient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from graph_tests.inputs import clone_tree, tensors
from graph_tests.layers.bench import Bench, raw_stream
from graph_tests.layers.findings import Findings
from graph_tests.layers.oplog import ApiNames, Op, OpLog
from graph_tests.layers.tolerance import same_bits
from graph_tests.verdict import Check, Kind, Status

CALLS_PER_OPERATOR = 2
SKIPPED_NAMESPACES = ("triton",)


def check_custom_ops(bench: Bench) -> Check:
    """Schema, fake and opcheck of every custom operator that one eager call meets."""
    args = clone_tree(bench.maker.make(0))
    torch.cuda.synchronize()
    api = ApiNames()
    log = OpLog(api, args, stream_of=raw_stream)
    log.keep_calls = True
    with bench.logging(api, log):
        bench.call(bench.eager, args)
    torch.cuda.synchronize()
    found = Findings()
    notes: list[str] = []
    done: dict[str, int] = {}
    custom = [op for op in log.ops if op.custom and op.namespace not in SKIPPED_NAMESPACES]
    for op, (func, op_args, op_kwargs) in zip(custom, log.calls, strict=True):
        done[op.qualified] = done.get(op.qualified, 0) + 1
        if done[op.qualified] <= CALLS_PER_OPERATOR:
            judge_call(op, func, op_args, op_kwargs, found)
            if done[op.qualified] == 1:
                _opcheck(op, func, op_args, op_kwargs, found, notes)
    torch.cuda.synchronize()
    evidence = tuple(f"{name}: {count} calls" for name, count in done.items())
    status = Status.FAIL if found else Status.PASS
    return Check("custom ops", status, "", found.tuple(), tuple(notes), evidence)


def judge_call(op: Op, func: Any, args: Any, kwargs: Any, found: Findings) -> None:
    """One real call on clones: what it wrote, and whether its fake foretells its results."""
    args, kwargs = clone_tree(args), clone_tree(kwargs)
    before = clone_tree((args, kwargs))
    with torch.no_grad():
        real = func(*args, **kwargs)
    declared = {id(t) for t in _declared(func, args, kwargs)}
    for position, (now, was) in enumerate(zip(tensors((args, kwargs)), tensors(before), strict=True)):
        if id(now) not in declared and not same_bits(now, was):
            said = f"{op.qualified} wrote its tensor argument {position}, which its schema calls read-only"
            found.add(Kind.MUTATION, op.qualified, op.where, said)
    said = fake_disagrees(func, before[0], before[1], real)
    if said:
        found.add(Kind.FAKE_MISMATCH, op.qualified, op.where, f"{op.qualified}: {said}")


def fake_disagrees(func: Any, args: Any, kwargs: Any, real: Any) -> str:
    """How the fake's results differ from the real ones in shape, strides, dtype or device; empty if they do not."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    convert = lambda t: mode.from_tensor(t, static_shapes=True) if isinstance(t, torch.Tensor) else t  # noqa: E731
    fake_args, fake_kwargs = tree_map(convert, (args, kwargs))
    try:
        with mode, torch.no_grad():
            fake = func(*fake_args, **fake_kwargs)
    except Exception as error:
        return f"its fake raised {type(error).__name__}: {str(error).splitlines()[0][:160]}"
    one, two = tree_leaves(real), tree_leaves(fake)
    if len(one) != len(two):
        return f"the operator returns {len(one)} values, its fake {len(two)}"
    for index, (a, b) in enumerate(zip(one, two, strict=True)):
        if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
            continue
        for what in ("shape", "stride", "dtype", "device"):
            left = tuple(getattr(a, what)()) if what == "stride" else getattr(a, what)
            right = tuple(getattr(b, what)()) if what == "stride" else getattr(b, what)
            if left != right and not (what == "stride" and a.numel() < 2):
                return f"result {index} has {what} {_plain(left)}, its fake says {_plain(right)}"
    return ""


def _plain(value: Any) -> str:
    return str(tuple(value)) if isinstance(value, torch.Size | tuple) else str(value)


def _declared(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    from graph_tests.layers.oplog import _written

    return _written(getattr(func, "_schema", None), args, kwargs)


def _opcheck(op: Op, func: Any, args: Any, kwargs: Any, found: Findings, notes: list[str]) -> None:
    """Torch's own schema and fake tests; what they cannot handle is a note."""
    results = torch.library.opcheck(
        func, clone_tree(args), clone_tree(kwargs), test_utils=("test_schema", "test_faketensor"), raise_exception=False
    )
    for test, result in results.items():
        if result == "SUCCESS" or found.at(op.where):
            continue
        text = " ".join(str(result).split())[:240]
        kind = Kind.MUTATION if test == "test_schema" else Kind.FAKE_MISMATCH
        if type(result).__name__ == "OpCheckError":
            found.add(kind, op.qualified, op.where, f"opcheck's {test}: {text}")
        else:
            notes.append(f"{op.qualified}: opcheck's {test} could not tell: {text}")
