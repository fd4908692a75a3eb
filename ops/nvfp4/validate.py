"""The checks that finalize makes once, so that no kernel ever has to: is every scale to be consumed a right one.

Bytes are counted on the device; the counts and the few float32 scales come to the host in one copy, and there the
rules are plain numpy, where subnormal numbers are not flushed.
"""

from __future__ import annotations

import numpy as np
import torch

from . import rules
from .raw import RawExperts
from .report import Finding, ScaleReport

REPAIRS = {
    "fill_activation_max": "a missing or unusable activation scale becomes the largest healthy one of its projection",
    "zero_nan_blocks": "block scale 0x7F over sixteen zero codes becomes 0x00",
}
"""Opt-in, by name; each use is listed in the report."""
_NO_FILE = "no file holds this tensor"
_RECALIBRATE = "re-calibrate, load as w4a4_per_token, or ask for the repair fill_activation_max"
_WAY_OUT = "fix or re-export the checkpoint"


def check(raw: RawExperts, precision: str = "w4a16", repairs: tuple[str, ...] = ()) -> ScaleReport:
    """Look at every scale of one layer, as ``finalize`` does, and hand nothing over.

    Args:
        raw: filled experts; scales alone are enough. Repairs are applied to it.
        precision, repairs: see ``finalize``.

    Returns:
        All findings; refusing is up to the caller.
    """
    return Check(raw, precision, repairs).run()


class Check:
    """One layer under inspection; collects findings and applies the repairs that were asked for."""

    def __init__(self, raw: RawExperts, precision: str, repairs: tuple[str, ...]) -> None:
        self.raw, self.spec, self.precision, self.repairs = raw, raw.spec, precision, repairs
        self.report = ScaleReport(precision, layers=1, experts=raw.spec.num_experts)

    def run(self) -> ScaleReport:
        """All rules; returns the report."""
        values, bytes_, bias = self._measure()
        self._provenance()
        parts = self.spec.projections
        weight, activation = values[: len(parts)], values[len(parts) :]
        for p, projection in enumerate(parts):
            self._weight_scale(projection, weight[p])
            self._blocks(projection, bytes_[p])
            for e in np.flatnonzero(self._written(projection, "bias") & (bias[p] > 0)):
                self._add("error", e, projection, "bias", "not_finite", f"{bias[p][e]} values", "must be finite")
        if self.precision == "w4a4_static":
            self._activation_scales(activation, weight)
        else:
            self._unused_activation_scales(activation)
        if len(parts) == 3:
            self._gate_up(weight[0], weight[1])
        self.report.findings.sort(key=lambda f: f.expert or 0)
        return self.report

    def _add(self, severity, expert, projection, tensor, kind, value, rule, action=_WAY_OUT) -> None:
        source = ", ".join(self.raw.sources.get((expert, projection, tensor), ()))
        self.report.findings.append(
            Finding(self.spec.layer, int(expert), projection, tensor, kind, value, rule, action, severity, source)
        )

    def _measure(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Float32 scales [2 P, E] (weights, then activations), byte counts [P, E, columns] and non-finite bias values
        [P, E], in one copy to the host.
        """
        t, p = self.raw.tensors, self.spec.projections
        scales = torch.stack(
            [*t["w13_global_scale"].unbind(1), t["w2_global_scale"], *t["a13_scale"].unbind(1), t["a2_scale"]]
        )
        blocks = [*t["w13_block_scale"].chunk(len(p) - 1, dim=1), t["w2_block_scale"]]
        counts = torch.stack([rules.count_bytes(b) for b in blocks])
        bias = scales.new_zeros(len(p), scales.shape[1], dtype=torch.int64)
        if self.spec.bias:
            both = [*t["w13_bias"].chunk(len(p) - 1, dim=1), t["w2_bias"]]
            bias = torch.stack([(~torch.isfinite(b)).sum(1) for b in both])
        parts = (scales.view(torch.int32).to(torch.int64), counts, bias)
        packed = torch.cat([part.flatten() for part in parts]).cpu().numpy()
        first, second, third = np.split(packed, np.cumsum([part.numel() for part in parts])[:-1])
        values = first.astype(np.int32).view(np.float32).reshape(scales.shape)
        return values, second.reshape(counts.shape), third.reshape(bias.shape)

    def _provenance(self) -> None:
        needed = ["weight", "weight_scale", "weight_scale_2"] + (["bias"] if self.spec.bias else [])
        if self.precision == "w4a4_static" and "fill_activation_max" not in self.repairs:
            needed.append("input_scale")
        for projection in self.spec.projections:
            for tensor in needed:
                action = _RECALIBRATE if tensor == "input_scale" else _WAY_OUT
                for e in np.flatnonzero(~self._written(projection, tensor)):
                    self._add("error", e, projection, tensor, "missing", "", _NO_FILE, action)
        for slot, sources in self.raw.sources.items():
            if len(sources) > 1:
                rule = f"written {len(sources)} times: {', '.join(sources[:4])}"
                self._add("error", *slot, "duplicate", "", rule)

    def _written(self, projection: str, tensor: str) -> np.ndarray:
        return np.array([(e, projection, tensor) in self.raw.sources for e in range(self.spec.num_experts)])

    def _weight_scale(self, projection: str, values: np.ndarray) -> None:
        written = self._written(projection, "weight_scale_2")
        dead: np.ndarray = np.zeros_like(written)
        coded = written & self._written(projection, "weight")
        for index in np.flatnonzero(coded & (values == 0)):
            dead[index] = not (self.raw.codes(int(index), projection) & 0x77).any()
        for e in np.flatnonzero(dead):
            self._add("note", e, projection, "weight_scale_2", "zero_expert", "0", "zero over codes that are all zero",
                      "the expert contributes exactly 0")  # fmt: skip
        bad = self._rules(projection, "weight_scale_2", values, written & ~dead, "error")
        for e in np.flatnonzero(written & ~bad & (values > 1)):
            self._add("error", e, projection, "weight_scale_2", "convention", f"{values[e]:.6g}",
                      "a weight scale above 1 is an encode factor (2688/amax), not amax/2688",
                      "load it in decode convention: store its reciprocal")  # fmt: skip
        self._outliers(projection, "weight_scale_2", values, written & ~dead)

    def _outliers(self, projection: str, tensor: str, values: np.ndarray, where: np.ndarray) -> None:
        far, median = rules.outliers(values, where)
        for e in far:
            self._add("note", e, projection, tensor, "outlier", f"{values[e]:.6g}",
                      f"more than {rules.OUTLIER_NOTE:g} times away from the median, {median:.3g}",
                      "legal; look at this expert's weights or calibration")  # fmt: skip

    def _rules(self, projection, tensor, values, where, severity, action=_WAY_OUT) -> np.ndarray:
        """Apply the rules of one float32 scale; returns where one failed."""
        bad: np.ndarray = np.zeros_like(where)
        for e, kind, rule in rules.faults(values, where):
            self._add(severity, e, projection, tensor, kind, f"{values[e]:.6g}", rule, action)
            bad[e] = True
        return bad

    def _activation_scales(self, values: np.ndarray, weight: np.ndarray) -> None:
        """w4a4_static consumes these; a repair may fill in what is unusable."""
        sound = []
        for p, projection in enumerate(self.spec.projections):
            written = self._written(projection, "input_scale")
            bad, written = self._repaired(projection, values[p], written)
            sound.append(written & ~bad)
            for e in np.flatnonzero(written & (values[p] == 1.0)):
                self._add("note", e, projection, "input_scale", "fallback", "1", "exactly 1.0 is what exporters write "
                          "for an expert that calibration never reached", "check the calibration")  # fmt: skip
            for e in np.flatnonzero(sound[p] & (values[p] > 1)):
                self._add("note", e, projection, "input_scale", "above_one", f"{values[p][e]:.6g}",
                          "legal: inputs above 2688 were seen", "check the convention")  # fmt: skip
            self._outliers(projection, "input_scale", values[p], sound[p])
        used = values.copy()
        if len(values) == 3:
            used[:2] = np.fmax(values[0], values[1])  # gate and up feed on one x
            for e in np.flatnonzero(sound[0] & sound[1] & (values[0] != values[1])):
                self._add("note", e, "gate_proj", "input_scale", "gate_up_input",
                          f"{values[0][e]:.6g} against {values[1][e]:.6g}", "up_proj has another one for the same x",
                          "their maximum is used")  # fmt: skip
        for p, projection in enumerate(self.spec.projections):
            for e in np.flatnonzero(sound[p] & rules.bad_alphas(used[p], weight[p])):
                self._add("error", e, projection, "input_scale", "alpha", f"{used[p][e]:.6g}",
                          f"its product with weight_scale_2 = {weight[p][e]:.6g} must be a normal float32")  # fmt: skip

    def _repaired(self, projection: str, values: np.ndarray, written: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Report unusable scales, or fill them in when asked; returns (bad, written) as they are afterwards."""
        fill = "fill_activation_max" in self.repairs
        healthy = values[written & rules.usable(values)]
        replacement = healthy.max() if fill and healthy.size else None
        severity, action = "error", _RECALIBRATE
        if replacement is not None:
            severity, action = "repaired", f"filled with the largest healthy one, {replacement:.6g}"
        bad = self._rules(projection, "input_scale", values, written, severity, action)
        if not fill:
            return bad, written
        for e in np.flatnonzero(~written):
            self._add(severity, e, projection, "input_scale", "missing", "", _NO_FILE, action)
        if replacement is None:
            return bad, written
        for e in np.flatnonzero(bad | ~written):
            self.raw.slot(int(e), projection, "input_scale").fill_(float(replacement))
            values[e] = replacement
        return np.zeros_like(bad), np.ones_like(written)

    def _unused_activation_scales(self, values: np.ndarray) -> None:
        """Not consumed, so nothing here is refused; but an expert without one saw no calibration token."""
        unused = f"{self.precision} does not need it"
        for p, projection in enumerate(self.spec.projections):
            written = self._written(projection, "input_scale")
            self._rules(projection, "input_scale", values[p], written, "note", unused)
            for e in np.flatnonzero(~written) if written.any() else ():
                self._add("note", e, projection, "input_scale", "uncalibrated", "", "the other experts have one: "
                          "calibration never reached it", unused)  # fmt: skip

    def _blocks(self, projection: str, counts: np.ndarray) -> None:
        n, k = self.spec.shape(projection)
        written = self._written(projection, "weight_scale")
        column = {name: counts[:, i] for i, name in enumerate(rules.BYTE_COLUMNS)}
        for e in np.flatnonzero(written & (column["nan"] + column["negative"] > 0)):
            self._bad_blocks(int(e), projection, int(column["nan"][e]), int(column["negative"][e]))
        total = n * k // 16
        for e in np.flatnonzero(written & (column["saturated"] > rules.SATURATED_NOTE * total)):
            self._add("note", e, projection, "weight_scale", "saturated", f"{column['saturated'][e] / total:.1%}",
                      "more than 1 % of the block scales are 448", "the global scale may be too small")  # fmt: skip
        stats = {"total": total * int(written.sum())}
        stats |= {name: int(column[name][written].sum()) for name in ("zero", "subnormal", "saturated")}
        self.report.merge(ScaleReport(self.precision, block_scales=stats))

    def _bad_blocks(self, e: int, projection: str, nan: int, negative: int) -> None:
        """Name the first bad byte of one expert, or repair NaN scales over zero codes when asked."""
        scale = self.raw.slot(e, projection, "weight_scale")
        bad = rules.bad_bytes(scale)
        if "zero_nan_blocks" in self.repairs and nan and self._written(projection, "weight")[e]:
            codes = self.raw.codes(e, projection)
            silent = ((scale & 0x7F) == 0x7F) & (codes.unflatten(-1, (-1, 8)) & 0x77 == 0).all(-1)
            repaired = int(silent.sum())
            if repaired:
                scale[silent] = 0
                self._add("repaired", e, projection, "weight_scale", "nan_block", f"{repaired} bytes",
                          "0x7F is NaN, here over zero codes only", "set to 0x00")  # fmt: skip
                nan -= repaired
                bad &= ~silent
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
        sound = rules.usable(gate) & rules.usable(up)
        self.report.gate_up_ratio = float(ratio[sound].max(initial=1.0))
        for e in np.flatnonzero(np.isfinite(ratio) & (ratio > rules.RATIO_NOTE)):
            self._add("note", e, "gate_proj", "weight_scale_2", "gate_up_ratio",
                      f"{gate[e]:.6g} against {up[e]:.6g}", "far from up_proj's",
                      "both are applied, each exactly")  # fmt: skip
