"""Which device a command or a load means."""

from __future__ import annotations

import torch

from .errors import CompiledMoeError, MachineError


def chosen(device: torch.device | str | None) -> torch.device:
    """The device asked for, or cuda where there is one.

    Raises:
        CompiledMoeError: no such device. MachineError: cuda, and PyTorch sees none.
    """
    try:
        found = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise CompiledMoeError(f"device is {device!r}; give cuda or cpu") from error
    if found.type == "cuda" and not torch.cuda.is_available():
        raise MachineError("no CUDA device is visible to PyTorch here; leave --device out, or give cpu")
    return found
