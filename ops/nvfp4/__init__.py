"""NVFP4 operators for PyTorch: the mirror of ``torch.ops.nvfp4``.

Importing registers the operators and does nothing else: no CUDA, no patching, no switches.
"""

from . import health
from .dense import LinearWeights, RawLinear, check_linear, finalize_linear
from .errors import CaptureError, GradError, NVFP4Error, ScaleError, ShapeError
from .mxfp4 import from_mxfp4
from .operators.dequantize import dequantize
from .operators.linear import linear
from .operators.moe import moe
from .operators.probe import probe
from .operators.quantize import quantize, quantize_per_token
from .operators.route import route
from .raw import ExpertsSpec, RawExperts
from .report import Finding, ScaleReport
from .validate import REPAIRS, check
from .weights import Candidate, ExpertWeights, explain, finalize, warmup

__all__ = [
    "REPAIRS",
    "Candidate",
    "CaptureError",
    "ExpertWeights",
    "ExpertsSpec",
    "Finding",
    "GradError",
    "LinearWeights",
    "NVFP4Error",
    "RawExperts",
    "RawLinear",
    "ScaleError",
    "ScaleReport",
    "ShapeError",
    "check",
    "check_linear",
    "dequantize",
    "explain",
    "finalize",
    "finalize_linear",
    "from_mxfp4",
    "health",
    "linear",
    "moe",
    "probe",
    "quantize",
    "quantize_per_token",
    "route",
    "warmup",
]
