"""Every scale of a checkpoint, measured and checked layer by layer, without a model and without its weights.

Only headers and scale tensors are read, through the memory map; codes only of the few experts whose scales leave a
question, or of all for a histogram of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from nvfp4 import NVFP4Error, RawExperts, ScaleReport, check, check_linear

from .checkpoint import Checkpoint
from .errors import CheckpointError
from .layers import Layer
from .parts import Part, codes_reader
from .shards import Reader

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class LayerSurvey:
    """One layer of experts.

    Attributes:
        layer: where it lies. nbytes: on disk. report: what is wrong or worth knowing.
        histogram: counts of the 256 block-scale bytes.
        weight_scale, input_scale: global scales in decode convention, [projections, experts], NaN where none is.
    """

    layer: Layer
    nbytes: int
    report: ScaleReport
    histogram: np.ndarray
    weight_scale: np.ndarray
    input_scale: np.ndarray

    @property
    def gate_up_ratio(self) -> float | None:
        """The largest ratio of an expert's gate and up scales, at least 1."""
        if len(self.weight_scale) < 3:
            return None
        with np.errstate(all="ignore"):
            ratio = np.exp2(np.abs(np.log2(self.weight_scale[0] / self.weight_scale[1])))
        sound = ratio[np.isfinite(ratio)]
        return float(sound.max()) if sound.size else None

    def to_dict(self) -> dict:
        """The numbers of one row."""
        spec = self.layer.spec
        return {
            "layer": spec.layer,
            "experts": spec.num_experts,
            "hidden_size": spec.hidden_size,
            "intermediate_size": spec.intermediate_size,
            "gated": len(spec.projections) == 3,
            "bytes": self.nbytes,
            "weight_scale_2": extremes(self.weight_scale),
            "input_scale": extremes(self.input_scale),
            "block_scale": self.report.block_scales | {"largest": largest(self.histogram)},
            "gate_up_ratio": self.gate_up_ratio,
            "findings": self.report.to_dict()["counts"],
        }


@dataclass
class Survey:
    """A whole checkpoint.

    Attributes:
        precision: what the checks were made for. layers: experts, in the order of the files.
        report: all findings. dense: names of the dense NVFP4 layers. histogram: block-scale bytes of all layers.
        codes: counts of the 16 codes, where asked for.
    """

    checkpoint: Checkpoint
    precision: str
    report: ScaleReport
    layers: list[LayerSurvey] = field(default_factory=list)
    dense: list[str] = field(default_factory=list)
    histogram: np.ndarray = field(default_factory=lambda: np.zeros(256, dtype=np.int64))
    codes: np.ndarray | None = None

    @property
    def usable(self) -> dict[str, bool | None]:
        """Whether each precision may serve this checkpoint; None where that was not looked at."""
        weights = not any(f.tensor != "input_scale" for f in self.report.errors)
        static = self.report.ok if self.precision == "w4a4_static" else None
        return {"w4a16": weights, "w4a4_per_token": weights, "w4a4_static": static}

    def to_dict(self) -> dict:
        """Plain data with a schema version."""
        q = self.checkpoint.quantization
        return {
            "schema": SCHEMA_VERSION,
            "checkpoint": str(self.checkpoint.path),
            "quantization": {"method": q.method, "algorithm": q.algorithm, "weight_only": q.weight_only},
            "precision": self.precision,
            "usable": self.usable,
            "layers": [layer.to_dict() for layer in self.layers],
            "dense_layers": self.dense,
            "block_scale_histogram": self.histogram[:128].tolist(),
            "code_histogram": None if self.codes is None else self.codes.tolist(),
            "report": self.report.to_dict(),
        }


def survey(
    checkpoint: Checkpoint,
    precision: str | None = None,
    codes: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Survey:
    """Measure and check every scale.

    Args:
        checkpoint: opened. precision: what to check for; default "w4a4_static" where the files hold activation scales,
            else "w4a16".
        codes: count the codes too, which reads all weights.
        progress: called with bytes done and bytes in all.

    Raises:
        CheckpointError: no NVFP4 tensors at all, or a tensor that cannot be read.
    """
    if not checkpoint.layers and not checkpoint.dense:
        raise CheckpointError(f"{checkpoint.path} holds no NVFP4 tensors, such as ...experts.0.gate_proj.weight_scale")
    if precision is None:
        measured = any(part.tensor == "input_scale" for layer in checkpoint.layers for part in layer.parts)
        precision = "w4a4_static" if measured else "w4a16"
    result = Survey(checkpoint, precision, ScaleReport(precision), codes=np.zeros(16, np.int64) if codes else None)
    reader, done, total = Reader(), 0, checkpoint.tensor_bytes
    for layer in checkpoint.layers:
        one = _experts(layer, precision, reader)
        result.layers.append(one)
        result.report.merge(one.report)
        result.histogram += one.histogram
        if result.codes is not None:
            for part in layer.weights.values():
                result.codes += count_codes(part, reader)
        done += one.nbytes
        if progress is not None:
            progress(done, total)
    for linear in checkpoint.dense:
        raw = linear.read(reader, scales_only=True)
        result.report.merge(check_linear(raw, precision))
        result.dense.append(linear.name)
    if progress is not None:
        progress(total, total)
    return result


def _experts(layer: Layer, precision: str, reader: Reader) -> LayerSurvey:
    raw = RawExperts.of(layer.spec, codes=codes_reader(layer.weights, reader))
    for part in layer.parts:
        if part.tensor == "weight":
            raw.note(part.expert, part.projection, "weight", part.source)
            continue
        try:
            for tensor, value in part.read(reader, scales_only=True):
                raw.load(part.expert, part.projection, tensor, value, part.source)
        except NVFP4Error as error:
            raise CheckpointError(str(error)) from error
    t = raw.tensors
    histogram = sum(
        torch.bincount(t[name].flatten(), minlength=256).numpy() for name in ("w13_block_scale", "w2_block_scale")
    )
    weight = torch.cat([t["w13_global_scale"], t["w2_global_scale"][:, None]], 1).T.numpy().copy()
    activation = torch.cat([t["a13_scale"], t["a2_scale"][:, None]], 1).T.numpy().copy()
    files = {part.header.key: part.header for part in layer.parts}
    size = sum(header.nbytes for header in files.values())
    return LayerSurvey(layer, size, check(raw, precision), np.asarray(histogram), weight, activation)


def count_codes(part: Part, reader: Reader) -> np.ndarray:
    """How often each of the 16 codes occurs in one weight."""
    ((_, value),) = part.read(reader)
    pairs = torch.bincount(value.flatten(), minlength=256).reshape(16, 16)
    return (pairs.sum(0) + pairs.sum(1)).numpy()


def extremes(scale: np.ndarray) -> list[float] | None:
    """Smallest and largest finite value, or None where there is none."""
    sound = scale[np.isfinite(scale)]
    return [float(sound.min()), float(sound.max())] if sound.size else None


def largest(histogram: np.ndarray) -> float | None:
    """The largest block scale that occurs."""
    used = np.flatnonzero(histogram[:127])
    return (
        float(torch.tensor([int(used[-1])], dtype=torch.uint8).view(torch.float8_e4m3fn).float()) if used.size else None
    )
