"""The checks that finalize makes once, so that no kernel ever has to: is every scale to be consumed a right one.

Bytes are counted on the device; the counts and the few float32 scales come to the host in one copy, and there the
rules are plain numpy, where subnormal numbers are not flushed.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .format import FLOAT32_MIN_NORMAL
from .raw import RawExperts
from .report import Finding, ScaleReport

REPAIRS = {
    "fill_activation_max": "a missing or unusable activation scale becomes the largest healthy one of its projection",
    "zero_nan_blocks": "block scale 0x7F over sixteen zero codes becomes 0x00",
}
"""Opt-in, by name; each use is listed in the report."""
RATIO_NOTE = 2.0
SATURATED_NOTE = 0.01
_NO_FILE = "no file holds this tensor"
_RECALIBRATE = "re-calibrate, load as w4a4_per_token, or ask for the repair fill_activation_max"
_WAY_OUT = "fix or re-export the checkpoint"
_SCALE_RULES = (
    ("not_finite", lambda v: ~np.isfinite(v), "must be finite"),
    ("negative", lambda v: v < 0, "must be positive"),
    ("zero", lambda v: v == 0, "must not be zero: it would be divided by, or silence the expert"),
    ("subnormal", lambda v: v < FLOAT32_MIN_NORMAL, "must be a normal float32: its reciprocal overflows"),
    ("reciprocal", lambda v: v > 2.0**126, "its reciprocal must be a normal float32"),
)
_BYTE_COLUMNS = ("nan", "negative", "zero", "subnormal", "saturated")


class Check:
    """One layer under inspection; collects findings and applies the repairs that were asked for."""

    def __init__(self, raw: RawExperts, precision: str, repairs: tuple[str, ...]) -> None:
        self.raw, self.spec, self.precision, self.repairs = raw, raw.spec, precision, repairs
        self.report = ScaleReport(precision, layers=1, experts=raw.spec.num_experts)

    def run(self) -> ScaleReport:
        """All rules; returns the report."""
        values, bytes_ = self._measure()
        self._provenance()
        static = self.precision == "w4a4_static"
        parts = self.spec.projections
        weight = values[: len(parts)]
        for p, projection in enumerate(parts):
            self._weight_scale(projection, weight[p])
            self._blocks(projection, bytes_[p])
        if static:
            self._activation_scales(values[len(parts) :], weight)
        else:
            self._unused_activation_scales(parts)
        if len(parts) == 3:
            self._gate_up(weight[0], weight[1])
        self.report.findings.sort(key=lambda f: f.expert)
        return self.report

    def _add(self, severity, expert, projection, tensor, kind, value, rule, action=_WAY_OUT) -> None:
        source = ", ".join(self.raw.sources.get((expert, projection, tensor), ()))
        self.report.findings.append(
            Finding(self.spec.layer, int(expert), projection, tensor, kind, value, rule, action, severity, source)
        )

    def _measure(self) -> tuple[np.ndarray, np.ndarray]:
        """Float32 scales [2 P, E] (weights, then activations) and byte counts [P, E, columns], in one copy."""
        t, p = self.raw.tensors, self.spec.projections
        scales = torch.stack(
            [*t["w13_global_scale"].unbind(1), t["w2_global_scale"], *t["a13_scale"].unbind(1), t["a2_scale"]]
        )
        rows = self.spec.intermediate_size
        blocks = [t["w13_block_scale"][:, i * rows : (i + 1) * rows] for i in range(len(p) - 1)] + [t["w2_block_scale"]]
        counts = torch.stack([count_bytes(b.reshape(b.shape[0], -1)) for b in blocks])
        packed = torch.cat([scales.view(torch.int32).flatten().to(torch.int64), counts.flatten()]).cpu().numpy()
        split = scales.numel()
        values = packed[:split].astype(np.int32).view(np.float32).reshape(scales.shape)
        return values, packed[split:].reshape(counts.shape)

    def _provenance(self) -> None:
        needed = ["weight", "weight_scale", "weight_scale_2"] + (["bias"] if self.spec.bias else [])
        if self.precision == "w4a4_static" and "fill_activation_max" not in self.repairs:
            needed.append("input_scale")
        for e in range(self.spec.num_experts):
            for projection in self.spec.projections:
                for tensor in needed:
                    if (e, projection, tensor) not in self.raw.sources:
                        action = _RECALIBRATE if tensor == "input_scale" else _WAY_OUT
                        self._add("error", e, projection, tensor, "missing", "", _NO_FILE, action)
        for (e, projection, tensor), sources in self.raw.sources.items():
            if len(sources) > 1:
                rule = f"written {len(sources)} times: {', '.join(sources[:4])}"
                self._add("error", e, projection, tensor, "duplicate", "", rule)

    def _written(self, projection: str, tensor: str) -> np.ndarray:
        return np.array([(e, projection, tensor) in self.raw.sources for e in range(self.spec.num_experts)])

    def _weight_scale(self, projection: str, values: np.ndarray) -> None:
        written = self._written(projection, "weight_scale_2")
        dead: np.ndarray = np.zeros_like(written)
        if (values[written] == 0).any():
            dead = self._all_zero_codes(projection) & (values == 0)
        for e in np.flatnonzero(dead):
            self._add("note", e, projection, "weight_scale_2", "zero_expert", "0", "zero over codes that are all zero",
                      "the expert contributes exactly 0")  # fmt: skip
        bad = self._rules(projection, "weight_scale_2", values, written & ~dead, "error")
        for e in np.flatnonzero(written & ~bad & (values > 1)):
            self._add("error", e, projection, "weight_scale_2", "convention", f"{values[e]:.6g}",
                      "a weight scale above 1 is an encode factor (2688/amax), not amax/2688",
                      "load it in decode convention: store its reciprocal")  # fmt: skip

    def _rules(self, projection, tensor, values, where, severity, action=_WAY_OUT) -> np.ndarray:
        """Apply _SCALE_RULES, first match wins; returns where one failed."""
        open_ = where.copy()
        for kind, fails, rule in _SCALE_RULES:
            with np.errstate(invalid="ignore"):
                hit = open_ & fails(values)
            for e in np.flatnonzero(hit):
                self._add(severity, e, projection, tensor, kind, f"{values[e]:.6g}", rule, action)
            open_ &= ~hit
        return where & ~open_

    def _all_zero_codes(self, projection: str) -> np.ndarray:
        return np.array(
            [not (self.raw.slot(e, projection, "weight") & 0x77).any() for e in range(self.spec.num_experts)]
        )

    def _activation_scales(self, values: np.ndarray, weight: np.ndarray) -> None:
        """w4a4_static consumes these; a repair may fill in what is unusable."""
        fill = "fill_activation_max" in self.repairs
        for p, projection in enumerate(self.spec.projections):
            written = self._written(projection, "input_scale")
            known = values[p][written]
            with np.errstate(invalid="ignore"):
                healthy = known[(known >= FLOAT32_MIN_NORMAL) & (known <= 2.0**126)]
            usable = fill and healthy.size > 0
            replacement = healthy.max() if usable else float("nan")
            severity = "repaired" if usable else "error"
            action = f"filled with the largest healthy one, {replacement:.6g}" if usable else (
                _RECALIBRATE
            )  # fmt: skip
            bad = self._rules(projection, "input_scale", values[p], written, severity, action)
            if fill:
                for e in np.flatnonzero(~written):
                    self._add(severity, e, projection, "input_scale", "missing", "", _NO_FILE, action)
                if usable:
                    for e in np.flatnonzero(bad | ~written):
                        self.raw.slot(int(e), projection, "input_scale").fill_(float(replacement))
                        values[p][e] = replacement
                        bad[e], written[e] = False, True
            self._alphas(projection, values[p], weight[p], written & ~bad)
            for e in np.flatnonzero(written & (values[p] == 1.0)):
                self._add("note", e, projection, "input_scale", "fallback", "1", "exactly 1.0 is what exporters write "
                          "for an expert that calibration never reached", "check the calibration")  # fmt: skip
        if len(self.spec.projections) == 3:
            for e in np.flatnonzero(np.isfinite(values[0]) & np.isfinite(values[1]) & (values[0] != values[1])):
                self._add("note", e, "gate_proj", "input_scale", "gate_up_input", f"{values[0][e]:.6g}",
                          f"up_proj has {values[1][e]:.6g} for the same x", "their maximum is used")  # fmt: skip

    def _alphas(self, projection: str, activation: np.ndarray, weight: np.ndarray, where: np.ndarray) -> None:
        with np.errstate(all="ignore"):
            alpha = activation * weight
            sound = (weight >= FLOAT32_MIN_NORMAL) & (weight <= 2.0**126)
            bad = where & sound & ~((alpha >= FLOAT32_MIN_NORMAL) & np.isfinite(alpha))
        for e in np.flatnonzero(bad):
            self._add("error", e, projection, "input_scale", "alpha", f"{activation[e]:.6g}",
                      f"its product with weight_scale_2 = {weight[e]:.6g} must be a normal float32")  # fmt: skip

    def _unused_activation_scales(self, parts: tuple[str, ...]) -> None:
        """An expert without activation scale beside experts with one saw no calibration token."""
        for projection in parts:
            written = self._written(projection, "input_scale")
            if written.any():
                for e in np.flatnonzero(~written):
                    self._add("note", e, projection, "input_scale", "uncalibrated", "", "the other experts have one: "
                              "calibration never reached it", f"{self.precision} does not need it")  # fmt: skip

    def _blocks(self, projection: str, counts: np.ndarray) -> None:
        n, k = self.spec.shape(projection)
        written = self._written(projection, "weight_scale")
        column = {name: counts[:, i] for i, name in enumerate(_BYTE_COLUMNS)}
        for e in np.flatnonzero(written & (column["nan"] + column["negative"] > 0)):
            self._bad_blocks(int(e), projection, int(column["nan"][e]), int(column["negative"][e]))
        total = n * k // 16
        for e in np.flatnonzero(written & (column["saturated"] > SATURATED_NOTE * total)):
            self._add("note", e, projection, "weight_scale", "saturated", f"{column['saturated'][e] / total:.1%}",
                      "more than 1 % of the block scales are 448", "the global scale may be too small")  # fmt: skip
        stats = {"total": total * int(written.sum())}
        stats |= {name: int(column[name][written].sum()) for name in ("zero", "subnormal", "saturated")}
        self.report.merge(ScaleReport(self.precision, block_scales=stats))

    def _bad_blocks(self, e: int, projection: str, nan: int, negative: int) -> None:
        """Name the first bad byte of one expert, or repair NaN scales over zero codes when asked."""
        scale, codes = self.raw.slot(e, projection, "weight_scale"), self.raw.slot(e, projection, "weight")
        is_nan = (scale & 0x7F) == 0x7F
        silent = is_nan & (codes.unflatten(-1, (-1, 8)) & 0x77 == 0).all(-1)
        if "zero_nan_blocks" in self.repairs and bool(silent.any()):
            scale[silent] = 0
            self._add("repaired", e, projection, "weight_scale", "nan_block", f"{int(silent.sum())} bytes",
                      "0x7F is NaN, here over zero codes only", "set to 0x00")  # fmt: skip
            nan -= int(silent.sum())
            is_nan &= ~silent
        bad = is_nan | ((scale > 0x80) & (scale != 0xFF))
        if nan + negative == 0:
            return
        row, column = (int(v) for v in bad.nonzero()[0])
        kind = "nan_block" if nan else "negative_block"
        self._add("error", e, projection, "weight_scale", kind, f"0x{int(scale[row, column]):02X}",
                  f"{nan} NaN and {negative} negative scale bytes, the first at row {row}, block {column}",
                  "re-export; over zero codes the repair zero_nan_blocks helps" if nan else _WAY_OUT)  # fmt: skip

    def _gate_up(self, gate: np.ndarray, up: np.ndarray) -> None:
        with np.errstate(all="ignore"):
            ratio = np.maximum(gate, up) / np.minimum(gate, up)
        for e in np.flatnonzero(np.isfinite(ratio) & (ratio > RATIO_NOTE)):
            self._add("note", e, "gate_proj", "weight_scale_2", "gate_up_ratio", f"{gate[e]:.6g}",
                      f"up_proj has {up[e]:.6g}", "both are applied, each exactly")  # fmt: skip


def count_bytes(scale: Tensor) -> Tensor:
    """Per row of e4m3 bytes [E, n]: NaN, negative, zero, subnormal and saturated (448)."""
    magnitude = scale & 0x7F
    nan = magnitude == 0x7F
    negative = (scale > 0x80) & ~nan
    columns = (nan, negative, magnitude == 0, (scale > 0) & (scale < 8), scale == 0x7E)
    return torch.stack([c.sum(1) for c in columns], dim=1)
