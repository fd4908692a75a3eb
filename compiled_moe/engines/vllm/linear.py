"""vLLM's linear layers on ``torch.ops.nvfp4.linear``: merged projections keep their own global scales, exactly."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.linear import LinearMethodBase, register_weight_loader_v2_supported_method
from vllm.model_executor.parameter import ModelWeightParameter, PerTensorScaleParameter

from nvfp4 import RawLinear, ScaleError, ScaleReport, check_linear

from ...names import SUFFIXES
from .experts import TENSORS


@register_weight_loader_v2_supported_method
class NVFP4LinearMethod(LinearMethodBase):
    """One linear layer of vLLM, which may be several of the checkpoint side by side."""

    def __init__(self, config: Any, name: str, dummy: bool) -> None:
        """Take the quantisation's config; ``dummy`` says that no checkpoint is read."""
        self.precision, self.format = config.precision, config.quantization.method
        self.name, self.dummy = name, dummy
        self.written: dict[str, list[Any]] = {}

    def create_weights(
        self,
        layer,
        input_size_per_partition,
        output_partition_sizes,
        input_size,
        output_size,
        params_dtype,
        **extra,
    ) -> None:
        """Slots with the producer's names; a record is kept of what is written."""
        layer.logical_widths = output_partition_sizes
        n, k, load = sum(output_partition_sizes), input_size_per_partition, extra["weight_loader"]
        RawLinear(self.name, n, k)  # states the rule about K

        def matrix(columns: int, dtype: torch.dtype, suffix: str):
            data, keep = torch.zeros(n, columns, dtype=dtype), self._recorded(load, suffix)
            return ModelWeightParameter(data=data, input_dim=1, output_dim=0, weight_loader=keep)

        def scalars(suffix: str):
            data = torch.full((len(output_partition_sizes),), float("nan"))
            return PerTensorScaleParameter(data=data, weight_loader=self._recorded(load, suffix))

        codes, block_scale, *scales = TENSORS[self.format]
        layer.register_parameter(codes, matrix(k // 2, torch.uint8, codes))
        layer.register_parameter(block_scale, matrix(k // 16, torch.float8_e4m3fn, block_scale))
        for suffix in scales:
            layer.register_parameter(suffix, scalars(suffix))

    def _recorded(self, load: Any, suffix: str):
        def weight_loader(param: Tensor, loaded_weight: Tensor, *args: Any, **kwargs: Any) -> Any:
            result = load(param, loaded_weight, *args, **kwargs)
            if not param.is_meta:  # a reload first counts on the meta device
                shard = args[0] if args else kwargs.get("loaded_shard_id")
                self.written.setdefault(SUFFIXES[suffix][0], []).append(shard)
            return result

        return weight_loader

    def process_weights_after_loading(self, layer) -> None:
        """Check each projection; keep one global scale for every output row.

        Raises:
            nvfp4.ScaleError: a scale is missing or unusable.
        """
        t = {}
        for suffix in TENSORS[self.format]:
            canonical, encode = SUFFIXES[suffix]
            data = getattr(layer, suffix).data
            t[canonical] = 1 / data if encode else data
            delattr(layer, suffix)
        widths = layer.logical_widths
        if not self.dummy:
            report = self._check(t, widths)
            if not report.ok:
                raise ScaleError(report)
        rows = torch.tensor(widths, device=t["weight"].device)
        keep = {
            "codes": t["weight"], "block_scale": t["weight_scale"].view(torch.uint8),
            "global_scale": t["weight_scale_2"].repeat_interleave(rows),
        }  # fmt: skip
        if self.precision == "w4a4_static":
            keep["a_scale"] = t["input_scale"].max().reshape(1)  # all projections read one x
        for name, tensor in keep.items():
            layer.register_parameter(name, torch.nn.Parameter(tensor.contiguous(), requires_grad=False))
        self.written = {}

    def _check(self, t: dict[str, Tensor], widths: list[int]) -> ScaleReport:
        report = ScaleReport(self.precision)
        named = any(shard == "q" for shards in self.written.values() for shard in shards)
        shards = ("q", "k", "v") if named else range(len(widths))
        begin = 0
        for i, (width, shard) in enumerate(zip(widths, shards, strict=True)):
            part = f" ({shard})" if len(widths) > 1 else ""
            raw = RawLinear(self.name + part, width, 2 * t["weight"].shape[1], t["weight"].device)
            for canonical, value in t.items():
                if any(s is None or s == shard for s in self.written.get(canonical, ())):
                    own = value[begin : begin + width] if value.dim() == 2 else value[i]
                    raw.load(canonical, own, self.name)
            report.merge(check_linear(raw, self.precision))
            begin += width
        return report

    def apply(self, layer, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """[..., K] to [..., N]."""
        rows = x.reshape(-1, x.shape[-1])
        a_scale = layer.a_scale if self.precision == "w4a4_static" else None
        b = None if bias is None else bias.float()
        out = torch.ops.nvfp4.linear(
            rows, layer.codes, layer.block_scale, layer.global_scale, a_scale, b, precision=self.precision
        )
        return out.reshape(*x.shape[:-1], out.shape[1])
