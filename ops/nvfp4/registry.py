"""How an operator is registered: one helper, so that every operator keeps the same law."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .errors import GradError, ShapeError

NAMESPACE = "nvfp4"
_library = torch.library.Library(NAMESPACE, "DEF")


def register(schema: str, *, cpu: Callable, cuda: Callable, fake: Callable) -> None:
    """Define ``nvfp4::<schema>`` with its kernels and its fake; dispatch costs half of ``torch.library.custom_op``."""
    name = schema.split("(", 1)[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))
    _library.impl(name, cpu, "CPU")
    _library.impl(name, cuda, "CUDA")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)


def refuse_grad(name: str, *tensors: Tensor | None) -> None:
    """Raise when a gradient would be needed: without this a define/impl operator returns a silently wrong one."""
    if not torch.is_grad_enabled():
        return
    if any(t is not None and t.requires_grad for t in tensors):
        raise GradError(
            f"nvfp4::{name} is inference only, and an input requires grad; call it under torch.no_grad() or "
            "torch.inference_mode(), or detach the input"
        )


def need(condition: bool, name: str, message: str) -> None:
    """Raise ShapeError with the operator's name unless ``condition``."""
    if not condition:
        raise ShapeError(f"nvfp4::{name}: {message}")


def need_activation_dtype(name: str, x: Tensor) -> None:
    """X must be a floating type the kernels know."""
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ShapeError(f"nvfp4::{name}: x is {x.dtype}, but must be bfloat16, float16 or float32; convert it first")


def need_same_device(name: str, x: Tensor, **tensors: Tensor | None) -> None:
    """Every tensor must lie where x lies."""
    device = x.device
    for key, t in tensors.items():
        if t is not None and t.device != device:
            raise ShapeError(f"nvfp4::{name}: {key} is on {t.device}, x on {x.device}; move them to one device")


def as_bytes(scale: Tensor) -> Tensor:
    """Block scales as the uint8 storage that crosses the operator boundary: a view, never a conversion."""
    return scale.view(torch.uint8) if scale.dtype == torch.float8_e4m3fn else scale
