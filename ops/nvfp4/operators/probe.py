"""A look at any tensor from inside a graph."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import reference
from ..health import PROBE_FIELDS
from ..kernels.health import probe_rows, probe_total
from ..registry import need, need_activation_dtype, need_same_device, refuse_grad, register
from .launch import on_device_of, require_warm

SCHEMA = "probe(Tensor x, Tensor(a!) stats) -> ()"


def _check(x: Tensor, stats: Tensor) -> None:
    refuse_grad("probe", x)
    need_activation_dtype("probe", x)
    need_same_device("probe", x, stats=stats)
    need(x.dim() >= 1, "probe", "x is a scalar; need [..., K]")
    need(
        stats.dtype == torch.float64 and tuple(stats.shape) == (PROBE_FIELDS,) and stats.is_contiguous(),
        "probe",
        f"stats is {stats.dtype} {tuple(stats.shape)}; need a contiguous float64 [{PROBE_FIELDS}] row",
    )


def _cpu(x: Tensor, stats: Tensor) -> None:
    _check(x, stats)
    reference.probe(x, stats)


def _fake(x: Tensor, stats: Tensor) -> None:
    _check(x, stats)


def _cuda(x: Tensor, stats: Tensor) -> None:
    _check(x, stats)
    k = x.shape[-1]
    rows = x.numel() // k if k else 0
    flat = x.contiguous()
    partial = x.new_empty((rows, 5), dtype=torch.float32)
    require_warm("probe", flat, k)
    with on_device_of(x):
        if rows:
            probe_rows[(rows,)](flat, partial, k, BLOCK=1024)
        probe_total[(1,)](partial, stats, rows, k, BLOCK=1024)


register(SCHEMA, cpu=_cpu, cuda=_cuda, fake=_fake)


def probe(x: Tensor, stats: Tensor) -> None:
    """Add what x holds to a row of statistics, on the device.

    Args:
        x: [..., K] bfloat16, float16 or float32.
        stats: float64 [8], zeroed by its owner; the columns are ``nvfp4.health.ProbeField``.

    Raises:
        ShapeError, GradError.
    """
    torch.ops.nvfp4.probe(x, stats)
