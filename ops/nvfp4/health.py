"""Instruments that work inside CUDA graphs: what the fields of a health row and of a probe row mean.

A health row is int64 ``[Field.TOKENS + num_experts]``, zeroed by its owner, added to by ``moe.health``; nothing reads
it on the host until somebody asks. A probe row is float64 ``[8]``, filled by ``probe``.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor


class Field(IntEnum):
    """Columns of a health row. Rows whose ids are all -1 are padding: counted, and looked at no further."""

    ROWS = 0
    """Live rows seen."""
    PADDING_ROWS = 1
    IDS_OUT_OF_RANGE = 2
    """Ids other than -1 outside [0, number of experts)."""
    NONFINITE_IN_ROWS = 3
    NONFINITE_IN = 4
    """NaN or infinite elements of x."""
    NONFINITE_OUT_ROWS = 5
    NONFINITE_OUT = 6
    AMAX_IN = 7
    """Largest finite magnitude of x, as the bits of a float32."""
    AMAX_OUT = 8
    TOKENS = 9
    """First of num_experts columns: rows routed to each local expert."""


class ProbeField(IntEnum):
    """Columns of a probe row."""

    CALLS = 0
    ROWS = 1
    ELEMENTS = 2
    AMAX = 3
    """Largest finite magnitude."""
    SQUARES = 4
    """Sum of squares of the finite elements; rms = sqrt(SQUARES / ELEMENTS)."""
    NAN = 5
    INF = 6
    ZERO_ROWS = 7


PROBE_FIELDS = len(ProbeField)
COUNTERS = int(Field.TOKENS)
"""Columns before the experts'; a plain number, since symbolic sizes cannot be added to an enum."""


def buffer(layers: int, num_experts: int, device: torch.device | str) -> Tensor:
    """A zeroed int64 health buffer, one row per layer."""
    return torch.zeros(layers, Field.TOKENS + num_experts, dtype=torch.int64, device=device)


def read(row: Tensor) -> dict:
    """One health row as plain numbers; copies to the host, so call it outside of graphs.

    Returns:
        Field names in lower case to numbers, and ``tokens`` as a list over experts.
    """
    values = row.cpu()
    amax = values[Field.AMAX_IN : Field.AMAX_OUT + 1].to(torch.int32).view(torch.float32).tolist()
    fields = {f.name.lower(): int(values[f]) for f in Field if f < Field.AMAX_IN}
    return fields | {"amax_in": amax[0], "amax_out": amax[1], "tokens": values[Field.TOKENS :].tolist()}


def read_probe(row: Tensor) -> dict:
    """One probe row as plain numbers, with ``rms``; copies to the host."""
    values = row.cpu().tolist()
    fields = {f.name.lower(): values[f] for f in ProbeField}
    squares = fields.pop("squares")
    return fields | {"rms": (squares / fields["elements"]) ** 0.5 if fields["elements"] else 0.0}
