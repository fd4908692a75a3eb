"""Hears every synchronisation: torch's warnings about its own, and torch's trace callbacks about explicit ones.

The trace callbacks cannot be taken out again for the life of a process; here they are registered once and ignored
unless a recorder is open.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator

import torch

from graph_tests.source import user_where
from graph_tests.verdict import Where

Heard = Callable[[str, Where | None], None]
_open: list[Heard] = []


@contextlib.contextmanager
def sync_warnings(heard: Heard) -> Iterator[None]:
    """Context: torch's sync debug mode reports each synchronising operation to ``heard`` and goes on."""

    def show(message: Warning | str, *args: object, **kwargs: object) -> None:
        if "synchronizing CUDA operation" in str(message):
            heard(str(message).splitlines()[0], user_where())

    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        shown, warnings.showwarning = warnings.showwarning, show
        try:
            yield
        finally:
            warnings.showwarning = shown
            torch.cuda.set_sync_debug_mode(before)


@contextlib.contextmanager
def explicit_syncs(heard: Heard) -> Iterator[None]:
    """Context: device, stream and event synchronisations that go through torch are reported to ``heard``."""
    _register()
    _open.append(heard)
    try:
        yield
    finally:
        _open.remove(heard)


@functools.cache
def _register() -> None:
    from torch.cuda import _gpu_trace

    torch._C._activate_gpu_trace()

    def hear(name: str) -> Callable[..., None]:
        def callback(*args: object) -> None:
            for heard in list(_open):
                heard(name, user_where())

        return callback

    _gpu_trace.register_callback_for_device_synchronization(hear("torch.cuda.synchronize"))
    _gpu_trace.register_callback_for_stream_synchronization(hear("Stream.synchronize"))
    _gpu_trace.register_callback_for_event_synchronization(hear("Event.synchronize"))
