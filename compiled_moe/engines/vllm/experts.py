"""vLLM's routed experts on ``torch.ops.nvfp4.moe``: loaded with a record, checked, then finalized."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase
from vllm.model_executor.utils import set_weight_attrs

from nvfp4 import ExpertsSpec, RawExperts, ScaleError, ScaleReport, finalize

from ...errors import CheckpointError
from ...names import SUFFIXES

SHARDS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_ACTIVATIONS = {
    "silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_tanh", "relu2_no_mul": "relu2", "swiglustep": "swiglustep",
    "swigluoai_uninterleave": "swigluoai",
}  # fmt: skip
TENSORS = {
    "modelopt": ("weight", "weight_scale", "weight_scale_2", "input_scale"),
    "compressed-tensors": ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale"),
}
"""What each producer calls codes, block scales, global scales and activation scales."""
BUFFERS = {
    "weight": ("w13", "w2"), "weight_scale": ("w13_block_scale", "w2_block_scale"),
    "weight_scale_2": ("w13_global_scale", "w2_global_scale"), "input_scale": ("a13_scale", "a2_scale"),
}  # fmt: skip

WAY_OUT = "re-calibrate, or serve it with --quantization compiled-moe or compiled-moe-w4a4-per-token, which need none"


def spec_of(layer: Any, experts: int, hidden: int, intermediate: int, name: str) -> ExpertsSpec:
    """What this rank's part of a layer of vLLM computes.

    Raises:
        CheckpointError: something that is not known here.
    """
    activation = _ACTIVATIONS.get(layer.activation.value)
    if activation is None or getattr(layer.moe_config, "has_bias", False):
        raise CheckpointError(
            f"{name}: activation {layer.activation.value!r}, "
            f"bias {getattr(layer.moe_config, 'has_bias', False)}; known without bias are {', '.join(_ACTIVATIONS)}"
        )
    limit = layer.swiglu_limit
    alpha, beta = (layer.swiglu_alpha or 1.0, layer.swiglu_beta or 0.0) if activation == "swigluoai" else (1.0, 0.0)
    bound = None if limit is None else float(limit)
    return ExpertsSpec(experts, hidden, intermediate, activation, False, name, float(alpha), float(beta), bound)


class NVFP4ExpertsMethod(FusedMoEMethodBase):
    """One layer's experts, local to this rank."""

    def __init__(self, config: Any, layer: Any, name: str, dummy: bool) -> None:
        """Take the quantisation's config; ``dummy`` says that no checkpoint is read."""
        super().__init__(layer.moe_config)
        self.precision, self.format = config.precision, config.quantization.method
        self.name, self.dummy = name, dummy
        self.layer = weakref.ref(layer)
        self.sources: dict[tuple[int, str, str], list[str]] = {}
        self.weights: Any = None

    def create_weights(
        self, layer, num_experts, hidden_size, intermediate_size_per_partition, params_dtype, **extra
    ) -> None:
        """Slots with the producer's names, each with the loader that keeps the record."""
        self.spec = spec_of(layer, num_experts, hidden_size, intermediate_size_per_partition, self.name)
        raw = RawExperts.of(self.spec, "meta")  # for its shapes: vLLM owns this memory, one tensor a parameter
        for suffix in TENSORS[self.format]:
            canonical, _ = SUFFIXES[suffix]
            for part, buffer in zip(("w13", "w2"), BUFFERS[canonical], strict=True):
                value = torch.zeros(raw.tensors[buffer].shape, dtype=raw.tensors[buffer].dtype)
                if canonical == "weight_scale":
                    value = value.view(torch.float8_e4m3fn)
                parameter = torch.nn.Parameter(value, requires_grad=False)
                set_weight_attrs(parameter, {"weight_loader": self.load, "nvfp4": suffix, "quant_method": "block"})
                layer.register_parameter(f"{part}_{suffix}", parameter)

    def load(
        self,
        param: Tensor,
        loaded_weight: Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        """Write this rank's part of one tensor of a checkpoint into its slot.

        Raises:
            CheckpointError: a shape or dtype that would have to be converted.
        """
        layer: Any = self.layer()
        local = layer._map_global_expert_id_to_local_expert_id(expert_id)
        if local < 0:
            return False if return_success else None
        suffix = param.nvfp4  # type: ignore[attr-defined]
        canonical, encode = SUFFIXES[suffix]
        projection = SHARDS[shard_id]
        source = f"{self.name}.{expert_id}.{shard_id}.{suffix}"
        target = param.data[local]
        if canonical in ("weight_scale_2", "input_scale"):
            target = target if projection == "down_proj" else target[int(projection == "up_proj")]
            value = loaded_weight.reshape(()) if loaded_weight.numel() == 1 else loaded_weight
            value = 1 / value if encode else value
        else:
            if projection != "down_proj":
                rows = self.spec.intermediate_size
                target = target[rows * (projection == "up_proj") :][:rows]
            value = self._shard(loaded_weight, int(projection == "down_proj"), target)
        if value.dtype == torch.uint8 and target.dtype == torch.float8_e4m3fn:
            value = value.view(target.dtype)
        if value.shape != target.shape or value.dtype != target.dtype:
            raise CheckpointError(
                f"{source}: got {loaded_weight.dtype} {tuple(loaded_weight.shape)}, need {target.dtype} "
                f"{tuple(target.shape)} on each of {self.moe.tp_size} ranks; values are viewed, never converted"
            )
        target.copy_(value)
        if not param.is_meta:  # a reload first counts on the meta device
            self.sources.setdefault((local, projection, canonical), []).append(source)
        return True if return_success else None

    def _shard(self, value: Tensor, dim: int, target: Tensor) -> Tensor:
        """What this rank holds of codes or block scales: rows of gate and up, columns of down."""
        size, ranks = target.shape[dim], self.moe.tp_size
        if value.dim() != 2 or value.shape[dim] != size * ranks:
            return value
        return value.narrow(dim, size * self.moe.tp_rank, size)

    def process_weights_after_loading(self, layer) -> None:
        """Check and finalize; on a reload the new values go to the old addresses.

        Raises:
            nvfp4.ScaleError: a scale is missing or unusable; experts are named by their global ids.
        """
        raw = RawExperts.of(self.spec, "meta")
        raw.device, raw.sources, self.sources = layer.w2_weight_scale.device, self.sources, {}
        for suffix in TENSORS[self.format]:
            canonical, _ = SUFFIXES[suffix]
            for part, buffer in zip(("w13", "w2"), BUFFERS[canonical], strict=True):
                data = getattr(layer, f"{part}_{suffix}").data
                raw.tensors[buffer] = data.view(torch.uint8) if canonical == "weight_scale" else data
        try:
            if self.weights is None:
                policy = "unchecked" if self.dummy else "raise"
                self.weights, _ = finalize(raw, self.precision, policy)
            else:
                self.weights.update_(raw)
        except ScaleError as error:
            raise ScaleError(as_served(error.report, layer)) from None
        for suffix in TENSORS[self.format]:
            for part in ("w13", "w2"):
                delattr(layer, f"{part}_{suffix}")
        for name, tensor in self.weights.tensors.items():
            layer.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))

    def get_fused_moe_quant_config(self, layer):
        """None: scales are arguments of the operator."""
        return None

    def apply(self, layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input):
        """[tokens, H] to [tokens, H]; this rank's experts only."""
        if layer.apply_router_weight_on_input:
            x, topk_weights = x * topk_weights.to(x.dtype), torch.ones_like(topk_weights)
        return self.weights(x, topk_ids, topk_weights.float(), layer.expert_map)


NVFP4ExpertsMethod.load.supports_moe_loading = True  # type: ignore[attr-defined]


def as_served(report: ScaleReport, layer: Any) -> ScaleReport:
    """The same findings under the ids that the checkpoint uses, with the ways out that there are under vLLM."""
    table = layer._expert_map
    ids = {} if table is None else {int(local): i for i, local in enumerate(table.tolist()) if local >= 0}
    findings = []
    for f in report.findings:
        action = WAY_OUT if f.tensor == "input_scale" and f.severity == "error" else f.action
        findings.append(replace(f, expert=None if f.expert is None else ids.get(f.expert, f.expert), action=action))
    return replace(report, findings=findings)
