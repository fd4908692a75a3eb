"""What a check of scales found: data first, then a table and JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field

SCHEMA_VERSION = 1
CAP = 12
"""Experts named in one line of the table; JSON names all."""


@dataclass(frozen=True)
class Finding:
    """One fact about one tensor of one expert; ``expert`` is None and ``projection`` empty for a dense layer.

    ``severity`` is "error" (refused), "repaired" (an opt-in repair was applied) or "note" (legal, worth knowing).
    """

    layer: str
    expert: int | None
    projection: str
    tensor: str
    kind: str
    value: str
    rule: str
    action: str
    severity: str
    source: str = ""


@dataclass
class ScaleReport:
    """Findings over one layer or a whole model.

    Attributes:
        precision: what the checks were made for; only what it consumes is required.
        findings: in layer, expert order.
        layers, experts, dense: how much was checked.
        block_scales: counts over all block-scale bytes: total, zero, subnormal, saturated.
        gate_up_ratio: largest ratio of an expert's gate and up scales, at least 1; each is applied exactly, while many
            engines use one for both.
    """

    precision: str
    findings: list[Finding] = field(default_factory=list)
    layers: int = 0
    experts: int = 0
    dense: int = 0
    block_scales: dict[str, int] = field(default_factory=dict)
    gate_up_ratio: float = 1.0

    @property
    def errors(self) -> list[Finding]:
        """What must not be served."""
        return [f for f in self.findings if f.severity == "error"]

    @property
    def ok(self) -> bool:
        """Nothing was refused."""
        return not self.errors

    def merge(self, other: ScaleReport) -> None:
        """Add another layer's report."""
        self.findings += other.findings
        self.layers += other.layers
        self.experts += other.experts
        self.dense += other.dense
        self.gate_up_ratio = max(self.gate_up_ratio, other.gate_up_ratio)
        for name, count in other.block_scales.items():
            self.block_scales[name] = self.block_scales.get(name, 0) + count

    def to_dict(self) -> dict:
        """Plain data with a schema version."""
        counts = {s: sum(f.severity == s for f in self.findings) for s in ("error", "repaired", "note")}
        body = {key: value for key, value in asdict(self).items() if key != "findings"}
        return {"schema": SCHEMA_VERSION, "ok": self.ok, "counts": counts} | body | {
            "findings": [asdict(f) for f in self.findings]
        }  # fmt: skip

    def to_json(self) -> str:
        """``to_dict`` as text."""
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        """One line, then a line per layer, tensor and kind."""
        total = max(self.block_scales.get("total", 0), 1)
        shares = ", ".join(f"{self.block_scales.get(k, 0) / total:.2%} {k}" for k in ("zero", "subnormal", "saturated"))
        head = (
            f"{_many(self.layers, 'layer')}, {_many(self.experts, 'expert')}"
            f"{', ' + _many(self.dense, 'dense layer') if self.dense else ''} checked for {self.precision}: "
            f"{_many(len(self.errors), 'error')}, "
            f"{_many(sum(f.severity == 'repaired' for f in self.findings), 'repair')}, "
            f"{_many(sum(f.severity == 'note' for f in self.findings), 'note')}; block scales {shares}"
            f"{'' if self.gate_up_ratio == 1 else f'; gate and up scales up to {self.gate_up_ratio:.3g}x apart'}"
        )
        return "\n".join([head, *_table(self.findings)])


def _many(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"


def _table(findings: Iterable[Finding]) -> list[str]:
    groups: dict[tuple, list[Finding]] = {}
    for f in findings:
        groups.setdefault((f.severity, f.layer, f.projection, f.tensor, f.kind, f.rule, f.action), []).append(f)
    order = {"error": 0, "repaired": 1, "note": 2}
    lines = []
    for key, group in sorted(groups.items(), key=lambda item: order[item[0][0]]):
        severity, layer, projection, tensor, kind, rule, action = key
        ids = [f.expert for f in group]
        shown = ", ".join(map(str, ids[:CAP])) + (f" and {len(ids) - CAP} more" if len(ids) > CAP else "")
        values = list(dict.fromkeys(f.value for f in group if f.value))
        value = f" = {', '.join(values[:3])}{', ...' if len(values) > 3 else ''}" if values else ""
        whose = f", expert{'s' if len(ids) > 1 else ''} {shown}: {projection}." if projection else ": "
        lines.append(f"  {severity}: {layer}{whose}{tensor}{value} [{kind}] {rule}; {action}")
    return lines
