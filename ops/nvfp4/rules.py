"""What makes a scale unusable: pure rules over numbers and bytes, shared by experts and dense layers.

The float32 rules are plain numpy on the host, where subnormal numbers are not flushed; bytes are counted on the device.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from .format import FLOAT32_MIN_NORMAL

LARGEST = 2.0**126
"""The largest float32 whose reciprocal is still normal."""
RATIO_NOTE = 2.0
"""A gate and an up scale that differ by more are reported."""
OUTLIER_NOTE = 128.0
"""A global scale this many times above or below its projection's median is reported."""
SATURATED_NOTE = 0.01
"""A share of block scales at 448 above this is reported."""
SCALE_RULES = (
    ("not_finite", lambda v: ~np.isfinite(v), "must be finite"),
    ("negative", lambda v: v < 0, "must be positive"),
    ("zero", lambda v: v == 0, "must not be zero: it would be divided by, or silence the expert"),
    ("subnormal", lambda v: v < FLOAT32_MIN_NORMAL, "must be a normal float32: its reciprocal overflows"),
    ("reciprocal", lambda v: v > LARGEST, "its reciprocal must be a normal float32"),
)
"""Kind, test and sentence; the first that fails names the fault."""
EXPERTS_AT_ONCE, BYTES_AT_ONCE = 6, 2**16
"""Scale bytes compared in one go: of six experts, or 64 KiB where six have less. A comparison holds two bytes for each
of them, and the smallest expert has eighteen for each of a projection: the peak stays below an expert of any size."""
BYTE_COLUMNS = ("nan", "negative", "zero", "subnormal", "saturated")


def faults(values: np.ndarray, where: np.ndarray) -> list[tuple[int, str, str]]:
    """Index, kind and rule of every value [n] under ``where`` [n] that no kernel may consume."""
    found: list[tuple[int, str, str]] = []
    open_ = where.copy()
    for kind, fails, rule in SCALE_RULES:
        with np.errstate(invalid="ignore"):
            hit = open_ & fails(values)
        found += [(int(i), kind, rule) for i in np.flatnonzero(hit)]
        open_ &= ~hit
    return found


def usable(values: np.ndarray) -> np.ndarray:
    """Where a scale breaks no rule."""
    with np.errstate(invalid="ignore"):
        return (values >= FLOAT32_MIN_NORMAL) & (values <= LARGEST)


def bad_alphas(activation: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Where both scales are usable, but their product is not a normal float32."""
    with np.errstate(all="ignore"):
        alpha = activation * weight
        return usable(activation) & usable(weight) & ~((alpha >= FLOAT32_MIN_NORMAL) & np.isfinite(alpha))


def outliers(values: np.ndarray, where: np.ndarray) -> tuple[np.ndarray, float]:
    """Indices far from the median of the usable values under ``where``, and that median."""
    sound = where & usable(values)
    if sound.sum() < 3:
        return np.zeros(0, dtype=np.int64), float("nan")
    median = float(np.median(values[sound]))
    with np.errstate(all="ignore"):
        far = sound & ((values > OUTLIER_NOTE * median) | (values * OUTLIER_NOTE < median))
    return np.flatnonzero(far), median


def bad_bytes(scale: Tensor) -> Tensor:
    """Mask of e4m3 bytes that are no scale: NaN, or negative and not -0."""
    return ((scale & 0x7F) == 0x7F) | (scale > 0x80)


def count_bytes(scale: Tensor) -> Tensor:
    """Per expert of e4m3 bytes [E, ...]: NaN, negative, zero, subnormal and saturated (448), int64 [E, 5]."""
    at_once = max(EXPERTS_AT_ONCE, BYTES_AT_ONCE // max(scale[0].numel(), 1))
    return torch.cat([_count(part.flatten(1)) for part in scale.split(at_once)])


def _count(scale: Tensor) -> Tensor:
    columns = (
        _true(scale & 0x7F == 0x7F),
        _true(scale > 0x80) - _true(scale == 0xFF),
        _true(scale & 0x7F == 0),
        _true(scale - 1 < 7),  # 0x01 .. 0x07: bytes wrap
        _true(scale == 0x7E),
    )
    return torch.stack(columns, dim=1)


def _true(mask: Tensor) -> Tensor:
    """True values per row of [n, size], int64.

    Eight of them are added as one word, whose eight bytes each count to 128: ``sum`` would first widen every one to
    eight bytes.
    """
    if mask.shape[1] % 8:
        return mask.sum(1)
    words = mask.view(torch.int64)
    counts = words.unflatten(1, (-1, math.gcd(words.shape[1], 128))).sum(2)
    return counts.view(torch.uint8).sum(1)
