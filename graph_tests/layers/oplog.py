"""A log of every operation a callable dispatches: its name, the user's line, and what the host put into it."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from graph_tests.layers.optable import classify, is_masked_fill
from graph_tests.source import user_where
from graph_tests.verdict import Kind, Where

BUILTIN_NAMESPACES = ("aten", "prim", "prims", "profiler", "inductor", "higher_order")


class ApiNames(TorchFunctionMode):
    """Keeps the name of the outermost torch function under way, as the user wrote it."""

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[str] = []

    @property
    def current(self) -> str:
        """The name of the outermost function under way, empty between functions."""
        return self.stack[0] if self.stack else ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.stack.append(getattr(func, "__name__", ""))
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.stack.pop()


@dataclasses.dataclass
class Op:
    """One dispatched operation."""

    name: str
    namespace: str
    api: str
    where: Where | None
    scalars: tuple[Any, ...]
    stream: int = 0
    writes: tuple[int, ...] = ()
    grid: tuple[int, ...] = ()
    kind: Kind | None = None
    pinned_source: bool = False

    @property
    def custom(self) -> bool:
        """True for operators that torch did not define: opaque to every static look."""
        return self.namespace not in BUILTIN_NAMESPACES

    @property
    def qualified(self) -> str:
        """The name with its namespace when it is not torch's."""
        return f"{self.namespace}::{self.name}" if self.custom else self.name


@dataclasses.dataclass
class External:
    """A tensor that the callable reads although nobody passed it in: a weight, a buffer, a closure's temporary."""

    storage: StorageWeakRef
    address: int
    nbytes: int
    shape: tuple[int, ...]
    device: str
    op: Op
    tensor: Callable[[], torch.Tensor | None]
    written: bool = False

    def alive(self) -> bool:
        """False once the memory went back to its allocator."""
        return not self.storage.expired()


class OpLog(TorchDispatchMode):
    """Logs operations on real tensors without changing what they do."""

    def __init__(self, api: ApiNames, inputs: Any = (), stream_of: Callable[[], int] | None = None) -> None:
        super().__init__()
        self.api = api
        self.ops: list[Op] = []
        self.externals: dict[int, External] = {}
        self.current: Op | None = None
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
        self.keep_calls = False
        self._stream_of = stream_of
        self._known: dict[int, StorageWeakRef] = {}
        self.learn(inputs)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        op = self.note(func, args, kwargs)
        if op is None:
            return func(*args, **kwargs)
        if op.custom and self.keep_calls:
            self.calls.append((func, args, kwargs))
        self.current = op
        out = func(*args, **kwargs)
        self.current = None
        self.learn(out)
        return out

    def learn(self, out: Any) -> None:
        """Remember what an operation made, so that it is not taken for something from outside."""
        with torch._C.DisableTorchFunction():
            for leaf in tree_leaves(out):
                if isinstance(leaf, torch.Tensor):
                    self._know(leaf)

    def note(self, func: Any, args: Any, kwargs: Any) -> Op | None:
        """Log one operation; None for the queries that are no work at all."""
        namespace, name = _names(func)
        if namespace == "prim" and name in ("device", "layout"):
            return None
        with torch._C.DisableTorchFunction():
            return self._note(func, namespace, name, args, kwargs)

    def _note(self, func: Any, namespace: str, name: str, args: Any, kwargs: Any) -> Op:
        leaves = tree_leaves((args, kwargs))
        schema = getattr(func, "_schema", None)
        op = Op(name, namespace, self.api.current, user_where(), _scalars(leaves))
        op.stream = self._stream_of() if self._stream_of is not None else 0
        self.ops.append(op)
        written = _written(schema, args, kwargs)
        op.writes = tuple(_storage_key(t) for t in written)
        op.kind = classify(name, op.api, args, kwargs)
        if op.kind is Kind.DATA_SHAPE and name.startswith("index_put") and is_masked_fill(args):
            op.kind = None
        if op.kind is Kind.HOST_TO_DEVICE:
            op.pinned_source = any(_pinned(leaf) for leaf in leaves)
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and not self._knows(leaf):
                self._external(leaf, op)
        for tensor in written:
            external = self.externals.get(_storage_key(tensor))
            if external is not None:
                external.written = True
        return op

    @property
    def opaque(self) -> tuple[str, ...]:
        """Custom operators met, each once, in order."""
        return tuple(dict.fromkeys(op.qualified for op in self.ops if op.custom))

    def declared_writes(self, tensor: torch.Tensor) -> Op | None:
        """The first logged operation whose schema says that it writes this tensor's memory."""
        key = _storage_key(tensor)
        return next((op for op in self.ops if key in op.writes), None)

    def _external(self, tensor: torch.Tensor, op: Op) -> None:
        key = _storage_key(tensor)
        if tensor.device.type == "cpu" and tensor.dim() == 0 and op.name == "lift_fresh":
            return
        storage = tensor.untyped_storage()
        address = 0 if isinstance(tensor, FakeTensor) else storage.data_ptr()
        self.externals[key] = External(
            StorageWeakRef(storage),
            address,
            storage.nbytes(),
            tuple(int(s) if isinstance(s, int) else -1 for s in tensor.shape),
            tensor.device.type,
            op,
            weakref.ref(tensor),
        )
        self._know(tensor)

    def _know(self, tensor: torch.Tensor) -> None:
        self._known[_storage_key(tensor)] = StorageWeakRef(tensor.untyped_storage())

    def _knows(self, tensor: torch.Tensor) -> bool:
        ref = self._known.get(_storage_key(tensor))
        return ref is not None and not ref.expired()


def _storage_key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _names(func: Any) -> tuple[str, str]:
    schema = getattr(func, "_schema", None)
    if schema is not None and "::" in schema.name:
        namespace, name = schema.name.split("::", 1)
        return namespace, name
    return getattr(func, "namespace", "higher_order"), getattr(func, "__name__", str(func))


def _scalars(leaves: list[Any]) -> tuple[Any, ...]:
    """Host values in an argument list: numbers, and the values of one-element CPU tensors."""
    found: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, bool | int | float | complex):
            found.append(leaf)
        elif type(leaf) in (torch.Tensor, torch.nn.Parameter) and leaf.device.type == "cpu" and leaf.numel() == 1:
            with _disable_current_modes():
                found.append(leaf.detach().item())
    return tuple(found)


def _pinned(leaf: Any) -> bool:
    """Pinned memory is known only where there is a GPU; without one a copy from the host counts as pageable."""
    if not isinstance(leaf, torch.Tensor) or isinstance(leaf, FakeTensor) or leaf.device.type != "cpu":
        return False
    with _disable_current_modes():
        return torch.cuda.is_available() and leaf.is_pinned()


def _written(schema: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    if schema is None:
        return []
    found = []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = kwargs.get(argument.name) if argument.kwarg_only or position >= len(args) else args[position]
        found += [t for t in tree_leaves(value) if isinstance(t, torch.Tensor)]
    return found
