"""Hears Triton compile, load and tune kernels, so that none of it goes unnoticed inside a capture."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

from graph_tests.source import user_where
from graph_tests.verdict import Kind, Where


@dataclasses.dataclass(frozen=True)
class Compilation:
    """One kernel that was compiled, loaded or tuned while it was watched."""

    kind: Kind
    kernel: str
    what: str
    where: Where | None


@contextlib.contextmanager
def watch_triton(seen: list[Compilation]) -> Iterator[None]:
    """Context: every Triton compilation, module load and benchmark is appended to ``seen``."""
    try:
        from triton import knobs
        from triton.runtime.autotuner import Autotuner
    except ImportError:
        yield
        return

    def compiling(*args: Any, **kwargs: Any) -> None:
        kernel = getattr(kwargs.get("fn"), "name", "") or str(kwargs.get("repr", "kernel")).split("[")[0]
        seen.append(Compilation(Kind.COMPILE_IN_CAPTURE, kernel.split(".")[-1], "compiled", user_where()))

    def loading(*args: Any, **kwargs: Any) -> None:
        name = next((a for a in args if isinstance(a, str)), str(kwargs.get("name", "kernel")))
        seen.append(Compilation(Kind.COMPILE_IN_CAPTURE, name, "loaded", user_where()))

    bench = Autotuner._bench

    def tuning(tuner: Any, *args: Any, **kwargs: Any) -> Any:
        name = getattr(getattr(tuner, "base_fn", None), "__name__", "kernel")
        seen.append(Compilation(Kind.AUTOTUNE_IN_CAPTURE, name, "benchmarked", user_where()))
        return bench(tuner, *args, **kwargs)

    runtime = knobs.runtime
    load = getattr(runtime, "kernel_load_start_hook", None)
    with contextlib.ExitStack() as stack:
        if hasattr(runtime, "jit_cache_hook"):
            stack.enter_context(_set(runtime, "jit_cache_hook", compiling))
        if hasattr(load, "add") and hasattr(load, "remove"):
            load.add(loading)  # type: ignore[union-attr]
            stack.callback(load.remove, loading)  # type: ignore[union-attr]
        stack.enter_context(mock.patch.object(Autotuner, "_bench", tuning))
        yield


@contextlib.contextmanager
def _set(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)

    def both(*args: Any, **kwargs: Any) -> Any:
        value(*args, **kwargs)
        return before(*args, **kwargs) if before is not None else None

    setattr(owner, name, both)
    try:
        yield
    finally:
        setattr(owner, name, before)
