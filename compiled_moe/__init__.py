"""NVFP4 mixture-of-experts models that compile, capture into CUDA graphs and never sync."""

from .dense import NVFP4Linear
from .engines import quantization_config, register_transformers
from .errors import CheckpointError, CompiledMoeError, MachineError
from .experts import NVFP4Experts, NVFP4MoE, enable_health, experts_of
from .loader import DEMO, Loaded, load

__all__ = [
    "DEMO",
    "CheckpointError",
    "CompiledMoeError",
    "Loaded",
    "MachineError",
    "NVFP4Experts",
    "NVFP4Linear",
    "NVFP4MoE",
    "enable_health",
    "experts_of",
    "load",
    "quantization_config",
    "register_transformers",
]
