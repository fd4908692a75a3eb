"""Hopper's own kernels: CUDA C++ compiled for sm_90a when they are first needed, and the weight layout they read."""

from __future__ import annotations

import functools

import torch

from . import compile as build

MAX_EXPERTS = 1024
"""Of one layer on one device: the sort keeps a counter for each in shared memory (around.cu)."""


@functools.cache
def unavailable(device: torch.device, experts: int = 1) -> str:
    """Why these kernels cannot serve a layer of so many experts on a device, or an empty text."""
    if device.type != "cuda":
        return f"weights are on {device}"
    capability = torch.cuda.get_device_capability(device)
    if capability != (9, 0):
        name = torch.cuda.get_device_name(device)
        return f"they are machine code for sm_90a, {name} is sm_{capability[0]}{capability[1]}"
    if experts > MAX_EXPERTS:
        return f"{experts} experts are more than {MAX_EXPERTS}"
    return build.unavailable()
