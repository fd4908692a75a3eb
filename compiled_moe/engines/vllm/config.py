"""vLLM's view of a checkpoint: which layer gets which method, for every producer's way of saying it."""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from ...errors import CheckpointError
from ...quantization import Quantization
from .experts import NVFP4ExpertsMethod
from .linear import NVFP4LinearMethod

_METHODS = ("modelopt", "compressed-tensors")


def register(take_over: str | None) -> None:
    """Register one quantisation method for each precision; ``take_over`` names the one that needs no flag."""
    for config in CONFIGS:
        config.unasked = config.precision == take_over
        register_quantization_config(config.name)(config)


class NVFP4Config(QuantizationConfig):
    """A checkpoint's quantisation, and the precision to serve it with."""

    precision: str
    name: str
    unasked = False

    def __init__(self, quantization: Quantization) -> None:
        """Take what the files say."""
        super().__init__()
        self.quantization = quantization

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> NVFP4Config:
        """Read config.json's quantization_config, or hf_quant_config.json.

        Raises:
            CheckpointError: another quantisation.
        """
        return cls(_read(config))

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg, user_quant, hf_config=None) -> str | None:
        """Take the checkpoint when asked to by name, or unasked where that was opted in."""
        wanted = user_quant == cls.name or (cls.unasked and user_quant not in [c.name for c in CONFIGS])
        if not wanted:
            return None
        try:
            _read(hf_quant_cfg)
        except CheckpointError:
            if user_quant == cls.name:
                raise
            return None
        return cls.name

    def get_name(self) -> str:
        """The word after --quantization."""
        return self.name

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """What the operators take."""
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """Triton's portable kernels."""
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Read where config.json says nothing."""
        return ["hf_quant_config.json"]

    def apply_vllm_mapper(self, hf_to_vllm_mapper) -> None:
        """Rename what is ignored as vLLM renames the modules."""
        q = self.quantization
        layers = dict(zip(hf_to_vllm_mapper.apply_list(list(q.layers)), q.layers.values(), strict=True))
        ignore = tuple(hf_to_vllm_mapper.apply_list(list(q.ignore)))
        self.quantization = Quantization(q.method, q.algorithm, q.weight_only, ignore, layers)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str):
        """Ours for NVFP4 experts and linear layers, vLLM's own for the rest."""
        if isinstance(layer, RoutedExperts):
            name = prefix.removesuffix(".routed_experts")
            return NVFP4ExpertsMethod(self, layer, name, dummy()) if self._experts(layer, name) else None
        if isinstance(layer, LinearBase | ParallelLMHead):
            head, _, leaf = prefix.rpartition(".")
            parts = self.packed_modules_mapping.get(leaf, [leaf])
            algorithm = self._algorithm(head, tuple(parts))
            return NVFP4LinearMethod(self, prefix, dummy()) if algorithm else UnquantizedLinearMethod()
        return None

    def _experts(self, layer: Any, name: str) -> bool:
        """Whether the files hold a layer of experts in NVFP4; they may list the layer, or each projection."""
        names = (layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name)
        parts = tuple(n for n in names if n is not None)
        whole = self.quantization.of(name)
        if self.quantization.ignores(name) or (whole is not None and self.quantization.algorithm == "MIXED_PRECISION"):
            return whole is not None
        return self._algorithm(f"{name}.0", parts) is not None

    def _algorithm(self, head: str, parts: tuple[str, ...]) -> str | None:
        """What the files say of modules that vLLM runs as one.

        Raises:
            CheckpointError: they differ, or it is no NVFP4.
        """
        said = {self.quantization.of(f"{head}.{part}" if head else part) for part in parts}
        if len(said) > 1:
            raise CheckpointError(f"{head}: vLLM runs {', '.join(parts)} as one, but they are quantised as {said}")
        (algorithm,) = said
        if algorithm is not None and algorithm not in ("NVFP4", "W4A16_NVFP4"):
            raise CheckpointError(f"{head}.{parts[0]} is quantised with {algorithm}; only NVFP4 is served here")
        return algorithm


class W4A16(NVFP4Config):
    """Activations stay as they are."""

    precision, name = "w4a16", "compiled-moe"


class W4A4Static(NVFP4Config):
    """Activation scales of the checkpoint."""

    precision, name = "w4a4_static", "compiled-moe-w4a4-static"


class W4A4PerToken(NVFP4Config):
    """Activation scales made for every token."""

    precision, name = "w4a4_per_token", "compiled-moe-w4a4-per-token"


CONFIGS: tuple[type[NVFP4Config], ...] = (W4A16, W4A4Static, W4A4PerToken)


def _read(said: dict[str, Any]) -> Quantization:
    """Read either file's object.

    Raises:
        CheckpointError: not one of the formats served here.
    """
    inner = said.get("quantization")
    if isinstance(inner, dict):
        said = {"quant_method": "modelopt"} | inner
    quantization = Quantization.read({"quantization_config": said}, None, "the checkpoint")
    if quantization.method not in _METHODS:
        raise CheckpointError(f"{quantization.method} checkpoints are not served by vLLM through this package")
    return quantization


def dummy() -> bool:
    """Whether vLLM fills weights with random numbers instead of a checkpoint's."""
    config = get_current_vllm_config_or_none()
    return config is not None and config.load_config.load_format == "dummy"
