"""Stand-ins that let code written for a GPU be traced where there is none, and that hear explicit synchronisation."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import shutil
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CAPABILITY = (9, 0)  # what code that asks is told where there is no GPU


@functools.cache
def device_guard() -> str:
    """Register a no-op CUDA device guard on a wheel without CUDA; returns why not, or an empty string."""
    if torch.version.cuda is not None:
        return ""
    from torch.utils import cpp_extension

    source = Path(__file__).with_name("device_guard.cpp")
    tag = hashlib.sha256(source.read_bytes() + f"{torch.__version__} {sys.version}".encode()).hexdigest()[:16]
    built = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "graph_tests" / f"device_guard_{tag}.so"
    try:
        if built.exists():
            torch.ops.load_library(str(built))
            return ""
        # In a folder of our own: torch's lock on a shared one outlives a process that is killed while it builds.
        with tempfile.TemporaryDirectory() as folder:
            name = "graph_tests_device_guard"
            cpp_extension.load(name, [str(source)], build_directory=folder, is_python_module=False, verbose=False)
            built.parent.mkdir(parents=True, exist_ok=True)
            scratch = built.with_suffix(f".{os.getpid()}")
            shutil.copy(Path(folder) / f"{name}.so", scratch)
            os.replace(scratch, built)
    except Exception as error:
        return f"no C++ compiler could build the CUDA device guard that fake indexing needs ({str(error)[:120]})"
    return ""


class _Stream:
    """What code asks of a stream, without a device."""

    cuda_stream = 0
    stream_id = 0
    device_index = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = torch.device("cuda", 0)

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        return None

    wait_stream = wait_event = record = wait = _nothing

    def record_event(self, event: Any = None) -> Any:
        return event if event is not None else _Stream()

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *args: object) -> None:
        return None


@contextlib.contextmanager
def pretend_cuda(heard: Callable[[str], None]) -> Iterator[None]:
    """Report every explicit synchronisation to ``heard``; on a machine without a GPU also stand in for streams."""
    cuda = torch.cuda
    with contextlib.ExitStack() as stack:

        def replace(owner: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(owner, name, value))

        def listen(name: str) -> Callable[..., None]:
            def quiet(*args: Any, **kwargs: Any) -> None:
                heard(name)

            return quiet

        replace(cuda, "synchronize", listen("torch.cuda.synchronize"))
        if cuda.is_available():
            replace(cuda.Stream, "synchronize", listen("Stream.synchronize"))
            replace(cuda.Event, "synchronize", listen("Event.synchronize"))
            yield
            return
        stream = type("Stream", (_Stream,), {"synchronize": listen("Stream.synchronize")})
        event = type("Event", (_Stream,), {"synchronize": listen("Event.synchronize")})
        nothing: Callable[..., Any] = lambda *a, **k: contextlib.nullcontext()  # noqa: E731
        replace(cuda, "Stream", stream)
        replace(cuda, "ExternalStream", stream)
        replace(cuda, "Event", event)
        for name in ("current_stream", "default_stream"):
            replace(cuda, name, lambda *a, **k: stream())
        for name in ("stream", "device", "device_of"):
            replace(cuda, name, nothing)
        replace(cuda, "is_current_stream_capturing", lambda: False)
        replace(cuda, "current_device", lambda: 0)
        replace(cuda, "get_device_capability", lambda *a: CAPABILITY)
        replace(cuda, "set_device", lambda *a: None)
        yield


@contextlib.contextmanager
def modules_on_cuda(fn: Any, fake: FakeTensorMode) -> Iterator[None]:
    """Without a GPU: parameters and buffers of the modules behind a callable are fake cuda tensors for a while."""
    if torch.cuda.is_available():
        yield
        return
    kept: list[tuple[dict[str, Any], str, Any]] = []
    moved: dict[int, Any] = {}  # tied weights stay tied
    try:
        for module in {id(m): m for root in _modules(fn) for m in root.modules()}.values():
            for held in (module._parameters, module._buffers):
                for name, tensor in held.items():
                    if tensor is None or isinstance(tensor, FakeTensor) or tensor.device.type != "cpu":
                        continue
                    kept.append((held, name, tensor))  # type: ignore[arg-type]
                    if id(tensor) not in moved:
                        with fake:
                            moved[id(tensor)] = torch.empty_strided(
                                tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda"
                            )
                    held[name] = moved[id(tensor)]  # type: ignore[index]
        yield
    finally:
        for held, name, tensor in kept:
            held[name] = tensor


def _modules(fn: Any) -> list[torch.nn.Module]:
    """Modules that a callable is, is a method of, closes over, or holds as an attribute."""
    cells = getattr(fn, "__closure__", None) or ()
    near = [fn, getattr(fn, "__self__", None), *(c.cell_contents for c in cells if c != _EMPTY)]
    if isinstance(fn, functools.partial):
        near += [*_modules(fn.func), *fn.args, *fn.keywords.values()]
    if not isinstance(fn, torch.nn.Module):
        near += list(getattr(fn, "__dict__", {}).values())
    return [thing for thing in near if isinstance(thing, torch.nn.Module)]


_EMPTY = types.CellType()


class StandIn(TorchDispatchMode):
    """Makes cuda tensors fake and leaves CPU tensors real; use inside the fake mode (see :func:`fake_inputs`)."""

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()
        self.fake = fake

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        device = kwargs.get("device")
        if any(isinstance(a, FakeTensor) for a in leaves) or (device and torch.device(device).type == "cuda"):
            kwargs = {**kwargs, "generator": None} if kwargs.get("generator") is not None else kwargs
            return func(*args, **kwargs)
        with unset_fake_temporarily():
            return func(*args, **kwargs)


class _CudaMethods(TorchFunctionMode):
    """``x.cuda()`` and ``x.pin_memory()`` where neither can be done."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0].to("cuda")
        if func is torch.Tensor.pin_memory:
            return args[0]
        if "pin_memory" in kwargs:
            kwargs = {**kwargs, "pin_memory": False}
        return func(*args, **kwargs)


class _Generator:
    """Makes CPU generators where cuda ones were asked for; a class, because torch writes ``Generator | None``."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return torch._C.Generator("cpu" if torch.device(device).type == "cuda" else device)


def fake_inputs(make: Callable[[], Any], fake: FakeTensorMode) -> Any:
    """Call ``make`` so that tensors asked for on cuda come out fake, whatever this machine has."""
    with (
        mock.patch.object(torch, "Generator", _Generator),
        pretend_cuda(lambda name: None),
        fake,
        StandIn(fake),
        _CudaMethods(),
    ):
        return make()
