"""The dispatch mode behind the static layer: classifies each operation and always finds a way to go on."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from graph_tests.cures import cure
from graph_tests.layers.oplog import ApiNames, Op, OpLog, _storage_key
from graph_tests.layers.optable import COPIES, HOST_NAMES, INDEXED, api_name, classify, is_masked_fill, operation_name
from graph_tests.source import user_where
from graph_tests.verdict import Finding, Kind, Where

MOST_READS = 1_000


class TooManyReads(Exception):
    """A loop that waits for a device value would never end on fake values."""


class RawPointer(RuntimeError):
    """The callable asked for the address of a fake tensor; a kernel launched on it would write anywhere."""


class FakeTrace(OpLog):
    """Logs and classifies operations on fake tensors; host reads get a made-up 1, unknown sizes their upper bound."""

    def __init__(self, fake: FakeTensorMode, api: FakeApiNames, inputs: Any) -> None:
        super().__init__(api, inputs)
        self.fake = fake
        self.findings: dict[tuple[str, str, str], Finding] = {}
        self.notes: list[str] = []
        self.error: Exception | None = None
        self.raw_pointer: Where | None = None
        self.custom_calls: dict[str, tuple[Any, Any, Any, Where | None]] = {}
        self._stand_ins: dict[int, Any] = {}
        self._reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        unknown = {_storage_key(t) for t in tree_leaves((args, kwargs)) if _outside(t) and not self._knows(t)}
        op = self.note(func, args, kwargs)
        if op is None:
            return func(*args, **kwargs)
        if not torch.cuda.is_available() and op.name not in COPIES | INDEXED | {"lift_fresh"}:
            args, kwargs = tree_map(lambda leaf: self._on_cuda(leaf, unknown), (args, kwargs))
        if op.custom:
            self.custom_calls.setdefault(op.qualified, (func, args, kwargs, op.where))
        kind = op.kind or classify(op.name, op.api, args, kwargs)
        if kind is Kind.DATA_SHAPE and op.name.startswith("index_put") and is_masked_fill(args):
            kind = None
        if kind is not None and not op.pinned_source:
            self.find(kind, operation_name(op.name, op.api), op.where, _evidence(kind, op))
        out = self._go_on(op, func, args, kwargs)
        self.learn(out)
        return out

    def find(self, kind: Kind, operation: str, where: Where | None, evidence: str) -> None:
        """Record a finding, or count it when it was met before."""
        finding = Finding(kind, operation, where, evidence, cure(kind, operation))
        old = self.findings.get(finding.key)
        count = old.count + 1 if old else 1
        self.findings[finding.key] = Finding(kind, operation, where, (old or finding).evidence, finding.cure, count)
        self._reads += 1
        if self._reads > MOST_READS:
            raise TooManyReads(f"stopped after {MOST_READS:,} host reads: a loop here waits for a device value")

    def heard_sync(self, name: str) -> None:
        """An explicit synchronisation was called."""
        where = user_where()
        self.find(Kind.EXPLICIT_SYNC, name, where, f"{name} makes the host wait for the device")

    def to_host(self, tensor: torch.Tensor, name: str) -> Any:
        """Ones, as numpy, in the shape of a fake tensor whose values were asked for."""
        import numpy

        with torch._C.DisableTorchFunction():
            on_cuda, shape = tensor.device.type == "cuda", tuple(int(s) for s in tensor.shape)
        if on_cuda:
            evidence = f"Tensor.{name} copies the values to the host and waits for them"
            self.find(Kind.HOST_READ, HOST_NAMES[name], user_where(), evidence)
        return numpy.ones(shape, dtype=numpy.float64 if tensor.dtype.is_floating_point else numpy.int64)

    def _go_on(self, op: Op, func: Any, args: Any, kwargs: Any) -> Any:
        """The operation's result; a made-up one where the real one depends on data."""
        name = op.name
        if name == "_local_scalar_dense" and args[0].device.type == "cuda":
            return _made_up(args[0])
        if name in ("equal", "allclose", "is_nonzero") and isinstance(args[0], FakeTensor):
            return True
        with self.fake:
            if name == "nonzero":
                return args[0].new_empty((max(args[0].numel(), 1), args[0].dim()), dtype=torch.int64)
            if name == "masked_select":
                return args[0].new_empty((max(args[0].numel(), 1),))
            if name == "bincount":
                weights = args[1] if len(args) > 1 else kwargs.get("weights")
                width = (args[2] if len(args) > 2 else kwargs.get("minlength", 0)) or 1
                return args[0].new_empty((width,), dtype=torch.float64 if weights is not None else torch.int64)
            if name in ("index", "_unsafe_index") and isinstance(args[0], FakeTensor):
                indices = [i for index in args[1] for i in self._as_list(index)]
                args = (args[0], indices, *args[2:])
            out = func(*args, **kwargs)
        if not any(_unbacked(leaf) for leaf in tree_leaves(out)):
            return out
        if name == "_local_scalar_dense":
            return _made_up(args[0])
        if classify(name, op.api, args, kwargs) is None:
            self.find(
                Kind.DATA_SHAPE, op.qualified, op.where, f"{op.qualified} reads the size of its result from the data"
            )
        with self.fake:
            return tree_map(lambda leaf: _bounded(leaf, args), out)

    def _as_list(self, index: Any) -> list[Any]:
        """A mask as the integer indices it stands for, at its upper bound."""
        if isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8):
            length = max(index.numel(), 1)
            return [index.new_empty((length,), dtype=torch.int64) for _ in range(max(index.dim(), 1))]
        return [index]

    def _on_cuda(self, leaf: Any, unknown: set[int]) -> Any:
        """On a machine without a GPU, a weight from outside stands for a weight on the GPU."""
        if not _outside(leaf) or leaf.numel() < 2 or leaf.dim() == 0:
            return leaf
        key = _storage_key(leaf)
        if key not in unknown and key not in self._stand_ins:
            return leaf
        self._stand_ins[key] = leaf.untyped_storage()
        with self.fake:
            return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="cuda")


class FakeApiNames(ApiNames):
    """Also answers the few Python calls that fake tensors cannot."""

    trace: FakeTrace

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if isinstance(first, FakeTensor) and name in ("numpy", "__array__"):
            return self.trace.to_host(first, name)
        if isinstance(first, FakeTensor) and name == "data_ptr":
            self.trace.raw_pointer = self.trace.raw_pointer or user_where()
            raise RawPointer("a fake tensor has no address: what is done with a raw pointer cannot be seen")
        if not torch.cuda.is_available():
            if func is torch.Tensor.cuda and first is not None:
                return super().__torch_function__(torch.Tensor.to, types, (first, "cuda"), {})
            if func is torch.Tensor.pin_memory and first is not None:
                return first
            if func is torch.Tensor.record_stream:
                return None
            if kwargs.get("pin_memory"):
                kwargs = {**kwargs, "pin_memory": False}
        return super().__torch_function__(func, types, args, kwargs)


@contextlib.contextmanager
def no_triton_launch(trace: FakeTrace) -> Iterator[None]:
    """Log Triton launches as opaque operators instead of compiling and launching them."""
    try:
        from triton.runtime.jit import JITFunction
    except ImportError:
        yield
        return

    def run(kernel: Any, *args: Any, **kwargs: Any) -> None:
        name = str(getattr(kernel, "__name__", None) or getattr(kernel.fn, "__name__", "kernel"))
        numbers = tuple(a for a in args if isinstance(a, bool | int | float))
        grid = kwargs.get("grid")
        sizes = tuple(grid) if isinstance(grid, tuple | list) else ()
        trace.ops.append(Op(name, "triton", trace.api.current, user_where(), numbers, grid=sizes))

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(JITFunction, "run", run))
        with contextlib.suppress(ImportError, AttributeError):
            from triton.runtime.autotuner import Autotuner

            stack.enter_context(mock.patch.object(Autotuner, "run", lambda self, *a, **k: run(self.base_fn, *a, **k)))
        yield


@contextlib.contextmanager
def lists_of_fakes(trace: FakeTrace) -> Iterator[None]:
    """Answer ``tolist`` of a fake tensor in one piece, whatever its size; torch reads it element by element."""

    def tolist(tensor: FakeTensor) -> Any:
        return trace.to_host(tensor, "tolist").tolist()

    log = logging.getLogger("torch._subclasses.fake_tensor")
    was, log.disabled = log.disabled, True
    try:
        with mock.patch.object(FakeTensor, "tolist", tolist):
            yield
    finally:
        log.disabled = was


def _made_up(tensor: torch.Tensor) -> Any:
    return True if tensor.dtype is torch.bool else 1.0 if tensor.dtype.is_floating_point else 1


def _outside(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and not isinstance(leaf, FakeTensor) and leaf.device.type == "cpu"


def _evidence(kind: Kind, op: Op) -> str:
    via = f" (through {api_name(op.api)})" if op.api and api_name(op.api) not in op.name else ""
    text = {
        Kind.HOST_READ: "reads device memory on the host and waits for it",
        Kind.DATA_SHAPE: "must know its data on the host to size its result",
        Kind.HOST_CHECK: "copies its error code to the host and waits for it",
        Kind.HOST_TO_DEVICE: "copies host memory to the device at every call",
        Kind.DEVICE_TO_HOST: "copies device memory to the host",
    }[kind]
    return f"aten::{op.name}{via} {text}"


def _unbacked(leaf: Any) -> bool:
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    if isinstance(leaf, torch.Tensor | torch.SymInt | torch.SymFloat | torch.SymBool):
        return bool(free_unbacked_symbols(leaf))
    return False


def _bounded(leaf: Any, args: Any) -> Any:
    """A tensor of known size in place of one whose size was read from data."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    if isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool):
        return 1
    if not isinstance(leaf, torch.Tensor) or not _unbacked(leaf):
        return leaf
    bound = max((t.numel() for t in tree_leaves(args) if isinstance(t, torch.Tensor)), default=1)
    sizes = [max(bound, 1) if free_unbacked_symbols(s) else int(s) for s in leaf.shape]
    return torch.empty(sizes, dtype=leaf.dtype, device=leaf.device)
