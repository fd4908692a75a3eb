"""What every launch of a Triton kernel shares: the device, the warm-up rule, and block sizes."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from ..errors import CaptureError

_warm: set[tuple] = set()


def on_device_of(x: Tensor) -> contextlib.AbstractContextManager:
    """Make x's device current for the launches inside; nothing to do when it is already, or on the CPU."""
    if x.device.type != "cuda" or x.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(x.device)


def require_warm(name: str, x: Tensor, *key) -> None:
    """Refuse the first call with these constants inside a capture: compiling and loading a module there breaks it."""
    full = (name, x.device, x.dtype, x.data_ptr() % 16 == 0, *key)
    if full in _warm:
        return
    if x.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise CaptureError.first_call(name)
    _warm.add(full)


def power_of_two(n: int, at_least: int = 16) -> int:
    """Smallest power of two >= max(n, at_least)."""
    return 1 << (max(n, at_least) - 1).bit_length()
