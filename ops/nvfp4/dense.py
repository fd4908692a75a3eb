"""Dense NVFP4 layers (attention, shared experts): checked as experts are, before ``nvfp4.linear`` serves them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from . import rules
from .errors import NVFP4Error, ScaleError, ShapeError
from .format import GROUP, PRECISIONS
from .registry import as_bytes
from .report import Finding, ScaleReport

_TENSORS = ("weight", "weight_scale", "weight_scale_2", "input_scale", "bias")


@dataclass(frozen=True)
class LinearWeights:
    """Arguments of ``torch.ops.nvfp4.linear`` after x: validated, as on disk."""

    codes: Tensor
    block_scale: Tensor
    global_scale: Tensor
    a_scale: Tensor | None
    bias: Tensor | None
    precision: str


class RawLinear:
    """Tensors of one dense layer, and who gave them.

    Attributes:
        name: for messages. tensors: canonical name to tensor. sources: canonical name to the places that wrote it.
    """

    def __init__(self, name: str, rows: int, columns: int, device: torch.device | str = "cpu") -> None:
        """An empty layer of N = rows, K = columns.

        Raises:
            ShapeError: K is no multiple of 16.
        """
        if rows < 1 or columns < 1 or columns % GROUP:
            raise ShapeError(f"{name}: weight [{rows}, {columns}]; NVFP4 needs K as a positive multiple of 16")
        self.name, self.rows, self.columns, self.device = name, rows, columns, torch.device(device)
        self.tensors: dict[str, Tensor] = {}
        self.sources: dict[str, list[str]] = {}

    def load(self, tensor: str, value: Tensor, source: str = "?") -> None:
        """Take one tensor; see ``RawExperts.load``.

        Raises:
            ShapeError: wrong name, shape or dtype; nothing is converted to fit.
        """
        n, k = self.rows, self.columns
        if tensor not in _TENSORS:
            raise ShapeError(f"{self.name}: no such tensor: {tensor}; known are {', '.join(_TENSORS)}")
        if tensor == "weight_scale":
            value = as_bytes(value)
        if tensor in ("weight_scale_2", "input_scale") and value.numel() == 1:
            value = value.reshape(1)
        shape = {"weight": (n, k // 2), "weight_scale": (n, k // GROUP), "bias": (n,)}.get(tensor, (1,))
        dtype = torch.uint8 if tensor in ("weight", "weight_scale") else torch.float32
        wrong = value.dtype != dtype if tensor != "bias" else not value.is_floating_point()
        if tuple(value.shape) != shape or wrong:
            raise ShapeError(
                f"{self.name}.{tensor} (from {source}): got {value.dtype} {tuple(value.shape)}, need {dtype} {shape}; "
                "values are viewed, never converted"
            )
        self.tensors[tensor] = value.to(self.device, copy=True).contiguous()  # a map of the file goes away
        self.note(tensor, source)

    def note(self, tensor: str, source: str) -> None:
        """Record that a file holds this tensor."""
        self.sources.setdefault(tensor, []).append(source)


def check_linear(raw: RawLinear, precision: str = "w4a16") -> ScaleReport:
    """Look at every scale of a dense layer; what ``check`` does for experts. The weight itself may be only noted."""
    report = ScaleReport(precision, dense=1)

    def add(severity, tensor, kind, value, rule, action="fix or re-export the checkpoint") -> None:
        source = ", ".join(raw.sources.get(tensor, ()))
        report.findings.append(Finding(raw.name, None, "", tensor, kind, value, rule, action, severity, source))

    static = precision == "w4a4_static"
    for tensor in ("weight", "weight_scale", "weight_scale_2", *(["input_scale"] if static else [])):
        if tensor not in raw.sources:
            add("error", tensor, "missing", "", "no file holds this tensor")
    for tensor, sources in raw.sources.items():
        if len(sources) > 1:
            add("error", tensor, "duplicate", "", f"written {len(sources)} times: {', '.join(sources[:4])}")
    scalars = [name for name in ("weight_scale_2", "input_scale") if name in raw.tensors]
    numbers = {name: raw.tensors[name].cpu().numpy() for name in scalars}
    for tensor, value in numbers.items():
        severity = "error" if static or tensor == "weight_scale_2" else "note"
        for _, kind, rule in rules.faults(value, np.ones(1, dtype=bool)):
            add(severity, tensor, kind, f"{value[0]:.6g}", rule)
    weight, activation = (numbers.get(name, np.zeros(1, np.float32)) for name in ("weight_scale_2", "input_scale"))
    if rules.usable(weight)[0] and weight[0] > 1:
        add("error", "weight_scale_2", "convention", f"{weight[0]:.6g}", "a weight scale above 1 is an encode factor "
            "(2688/amax), not amax/2688", "load it in decode convention: store its reciprocal")  # fmt: skip
    if static and rules.bad_alphas(activation, weight)[0]:
        add("error", "input_scale", "alpha", f"{activation[0]:.6g}",
            f"its product with weight_scale_2 = {weight[0]:.6g} must be a normal float32")  # fmt: skip
    if "weight_scale" in raw.tensors:
        _blocks(raw, report, add)
    if "bias" in raw.tensors and (bad := int((~torch.isfinite(raw.tensors["bias"])).sum())):
        add("error", "bias", "not_finite", f"{bad} values", "must be finite")
    return report


def _blocks(raw: RawLinear, report: ScaleReport, add) -> None:
    scale = raw.tensors["weight_scale"]
    counts = rules.count_bytes(scale.reshape(1, -1))[0].tolist()
    column = dict(zip(rules.BYTE_COLUMNS, counts, strict=True))
    if column["nan"] + column["negative"]:
        row, block = (int(v) for v in rules.bad_bytes(scale).nonzero()[0])
        add("error", "weight_scale", "nan_block" if column["nan"] else "negative_block",
            f"0x{int(scale[row, block]):02X}", f"{column['nan']} NaN and {column['negative']} negative scale bytes, "
            f"the first at row {row}, block {block}")  # fmt: skip
    if column["saturated"] > rules.SATURATED_NOTE * scale.numel():
        add("note", "weight_scale", "saturated", f"{column['saturated'] / scale.numel():.1%}",
            "more than 1 % of the block scales are 448", "the global scale may be too small")  # fmt: skip
    shares = {name: column[name] for name in ("zero", "subnormal", "saturated")}
    report.block_scales = {"total": scale.numel()} | shares


def finalize_linear(
    raw: RawLinear, precision: str = "w4a16", policy: str = "raise"
) -> tuple[LinearWeights, ScaleReport]:
    """Check a dense layer and hand its tensors over.

    Args:
        raw: filled. precision: see ``nvfp4.linear``. policy: "raise", "report" or "unchecked", as for experts.

    Raises:
        ScaleError: something was refused. NVFP4Error: an unknown precision, or no weight at all.
    """
    if precision not in PRECISIONS:
        raise NVFP4Error(f"precision is {precision!r}; known are {', '.join(PRECISIONS)}")
    report = ScaleReport(precision, dense=1) if policy == "unchecked" else check_linear(raw, precision)
    if policy == "raise" and not report.ok:
        raise ScaleError(report)
    t = raw.tensors
    absent = [name for name in ("weight", "weight_scale", "weight_scale_2") if name not in t]
    static = precision == "w4a4_static"
    if static and "input_scale" not in t:
        absent.append("input_scale")
    if absent:
        raise ScaleError(report) if not report.ok else NVFP4Error(f"{raw.name}: {', '.join(absent)} never loaded")
    a_scale = t["input_scale"] if static else None
    weights = LinearWeights(t["weight"], t["weight_scale"], t["weight_scale_2"], a_scale, t.get("bias"), precision)
    return weights, report
