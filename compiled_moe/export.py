"""Quantise the experts of a transformers mixture-of-experts model and write them in ModelOpt's layout."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from nvfp4 import quantize
from nvfp4.format import scale_of_amax


class Calibration:
    """Largest input magnitude of each expert's projections over some text; experts that saw nothing have none.

    Use as a context manager around forward passes of an unquantised model.
    """

    def __init__(self, model: Any) -> None:
        """Watch every experts module of the model."""
        self.experts: dict[str, Any] = {n: m for n, m in model.named_modules() if _is_experts(m)}
        if not self.experts:
            raise ValueError(f"{type(model).__name__} has no experts modules with gate_up_proj and down_proj")
        self.input_amax = {n: torch.full((m.down_proj.shape[0],), -1.0) for n, m in self.experts.items()}
        self.hidden_amax = {n: torch.full((m.down_proj.shape[0],), -1.0) for n, m in self.experts.items()}
        self.tokens = {n: torch.zeros(m.down_proj.shape[0], dtype=torch.int64) for n, m in self.experts.items()}
        self._hooks: list = []

    def __enter__(self) -> Calibration:
        """Start watching."""
        for name, module in self.experts.items():
            self._hooks.append(module.register_forward_pre_hook(lambda m, args, name=name: self._watch(name, m, *args)))
        return self

    def __exit__(self, *_) -> None:
        """Stop watching."""
        for hook in self._hooks:
            hook.remove()

    @torch.no_grad()
    def _watch(self, name: str, module: Any, x: Tensor, ids: Tensor, *_) -> None:
        inter = module.down_proj.shape[2]
        for e in ids.unique().tolist():
            rows = x[(ids == e).any(1)]
            both = rows @ module.gate_up_proj[e].T
            h = module.act_fn(both[:, :inter]) * both[:, inter:]
            for store, value in ((self.input_amax, rows), (self.hidden_amax, h)):
                store[name][e] = max(float(store[name][e]), float(value.abs().max()))
            self.tokens[name][e] += rows.shape[0]


def _is_experts(module: nn.Module) -> bool:
    return all(isinstance(getattr(module, n, None), nn.Parameter) for n in ("gate_up_proj", "down_proj"))


def expert_tensors(name: str, module: Any, calibration: Calibration) -> Iterable[tuple[str, Tensor]]:
    """Yield ModelOpt's four tensors of each projection of each expert.

    An expert that calibration never reached gets no input_scale: a number made up here could not be told from a
    measured one later.
    """
    inter = module.down_proj.shape[2]
    for e in range(module.down_proj.shape[0]):
        gate_up, down = module.gate_up_proj[e].float(), module.down_proj[e].float()
        parts = {"gate_proj": gate_up[:inter], "up_proj": gate_up[inter:], "down_proj": down}
        for projection, weight in parts.items():
            prefix = f"{name}.{e}.{projection}"
            scale = scale_of_amax(weight.abs().amax())
            codes, block_scale = quantize(weight.contiguous(), scale)
            yield f"{prefix}.weight", codes
            yield f"{prefix}.weight_scale", block_scale.view(torch.float8_e4m3fn)
            yield f"{prefix}.weight_scale_2", scale
            amax = (calibration.hidden_amax if projection == "down_proj" else calibration.input_amax)[name][e]
            if amax >= 0:
                yield f"{prefix}.input_scale", scale_of_amax(amax)


@torch.no_grad()
def export(model: Any, calibration: Calibration, folder: str | Path) -> Path:
    """Write config.json and model.safetensors: experts in NVFP4, everything else as it is in bfloat16.

    Args:
        model: a transformers model with fused experts. calibration: filled by forward passes over representative text.
        folder: made if missing.

    Returns:
        The folder.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for name, module in calibration.experts.items():
        tensors.update(expert_tensors(name, module, calibration))
    inside = tuple(f"{name}." for name in calibration.experts)
    tied = set(getattr(model, "_tied_weights_keys", None) or ()) if model.config.tie_word_embeddings else set()
    for name, value in model.state_dict().items():
        if not name.startswith(inside) and name not in tied:
            tensors[name] = value.to(torch.bfloat16)
    save_file({n: t.contiguous().cpu() for n, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    config = model.config.to_dict()
    config["dtype"] = "bfloat16"
    config["quantization_config"] = {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "group_size": 16,
        "ignore": ["lm_head", "*self_attn*", "*mlp.gate", "*embed_tokens*"],
        "producer": {"name": "compiled-moe"},
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    return folder
