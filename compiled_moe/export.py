"""Quantise the experts of a transformers mixture-of-experts model and write them in ModelOpt's layout."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nvfp4 import quantize
from nvfp4.format import scale_of_amax

from .errors import CheckpointError
from .writing import SHARD_BYTES, ShardWriter, modelopt_config

ACTIVATION_POLICIES = {
    "per_expert": "each expert's own maximum; an expert that saw no token gets no input_scale",
    "layer_max": "the maximum over the layer's experts, for all of them, those without tokens included",
    "none": "no input_scale at all: a weight-only checkpoint",
}
"""Where input_scale comes from; always a choice, never an accident."""


class Calibration:
    """Largest input magnitude of each expert's projections over some text; experts that saw nothing have none.

    Use as a context manager around forward passes of an unquantised model.

    Attributes:
        experts: the experts modules by name.
        input_amax, hidden_amax: by name, float32 [experts], -1 where nothing came. tokens: int64 [experts].
    """

    def __init__(self, model: Any) -> None:
        """Watch every experts module of the model.

        Raises:
            CheckpointError: there is none, or one whose layout is not [experts, 2 intermediate, hidden] without bias.
        """
        self.experts: dict[str, Any] = {n: m for n, m in model.named_modules() if _is_experts(m)}
        if not self.experts:
            raise CheckpointError(f"{type(model).__name__} has no experts modules with gate_up_proj and down_proj")
        for name, module in self.experts.items():
            if any(getattr(module, flag, False) for flag in ("is_transposed", "has_bias", "has_post_expert_norm")):
                raise CheckpointError(
                    f"{name} is {type(module).__name__}, whose weights are transposed or have biases; this quantises "
                    "experts of [2 intermediate, hidden] and [hidden, intermediate] without bias"
                )
        self.input_amax = {n: torch.full((m.down_proj.shape[0],), -1.0) for n, m in self.experts.items()}
        self.hidden_amax = {n: torch.full((m.down_proj.shape[0],), -1.0) for n, m in self.experts.items()}
        self.tokens = {n: torch.zeros(m.down_proj.shape[0], dtype=torch.int64) for n, m in self.experts.items()}
        self._hooks: list = []

    @property
    def dead(self) -> dict[str, list[int]]:
        """Experts that saw no token, by layer; layers without any are left out."""
        found = {name: (count == 0).nonzero().flatten().tolist() for name, count in self.tokens.items()}
        return {name: ids for name, ids in found.items() if ids}

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
        for e in ids.unique().tolist():
            if not 0 <= e < module.down_proj.shape[0]:
                continue  # padding
            rows = x[(ids == e).any(1)]
            h = module._apply_gate(rows @ module.gate_up_proj[e].T)
            for store, value in ((self.input_amax, rows), (self.hidden_amax, h)):
                store[name][e] = max(float(store[name][e]), float(value.abs().max()))
            self.tokens[name][e] += rows.shape[0]

    def amax(self, name: str, projection: str, policy: str) -> Tensor:
        """Input magnitudes of one projection under a policy, [experts]; negative where there shall be no scale."""
        seen = (self.hidden_amax if projection == "down_proj" else self.input_amax)[name]
        if policy == "none":
            return torch.full_like(seen, -1.0)
        return seen if policy == "per_expert" else torch.full_like(seen, float(seen.max()))


def _is_experts(module: nn.Module) -> bool:
    return all(isinstance(getattr(module, n, None), nn.Parameter) for n in ("gate_up_proj", "down_proj"))


def expert_tensors(
    name: str, module: Any, calibration: Calibration, policy: str = "per_expert"
) -> Iterator[tuple[str, Tensor]]:
    """Yield ModelOpt's tensors of each projection of each expert.

    Under "per_expert", an expert that calibration never reached gets no input_scale: a number made up here could not be
    told from a measured one later.

    Raises:
        CheckpointError: a weight that is not finite.
    """
    inter = module.down_proj.shape[2]
    amax = {p: calibration.amax(name, p, policy) for p in ("gate_proj", "up_proj", "down_proj")}
    for e in range(module.down_proj.shape[0]):
        gate_up, down = module.gate_up_proj[e].float(), module.down_proj[e].float()
        parts = {"gate_proj": gate_up[:inter], "up_proj": gate_up[inter:], "down_proj": down}
        for projection, weight in parts.items():
            prefix = f"{name}.{e}.{projection}"
            scale = scale_of_amax(weight.abs().amax())
            if not torch.isfinite(scale):
                raise CheckpointError(f"{prefix} holds NaN or infinity; mend the model before it is quantised")
            codes, block_scale = quantize(weight.contiguous(), scale)
            yield f"{prefix}.weight", codes
            yield f"{prefix}.weight_scale", block_scale.view(torch.float8_e4m3fn)
            yield f"{prefix}.weight_scale_2", scale
            if amax[projection][e] >= 0:
                yield f"{prefix}.input_scale", scale_of_amax(amax[projection][e])


@torch.no_grad()
def export(
    model: Any,
    calibration: Calibration,
    folder: str | Path,
    policy: str = "per_expert",
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write a checkpoint: experts in NVFP4, everything else as it is in bfloat16; one shard in memory at a time.

    Args:
        model: a transformers model with fused experts. calibration: filled by forward passes over representative text.
        folder: made if missing. policy: a name of ``ACTIVATION_POLICIES``. shard_bytes: of a file.
        progress: called with bytes done and bytes in all, of the model as it is.

    Returns:
        The folder.

    Raises:
        CheckpointError: an unknown policy, weights that are not finite, or a folder that holds a checkpoint.
    """
    if policy not in ACTIVATION_POLICIES:
        raise CheckpointError(f"activation policy is {policy!r}; known are {', '.join(ACTIVATION_POLICIES)}")
    writer = ShardWriter(Path(folder), shard_bytes)
    done, total = 0, sum(p.numel() * p.element_size() for p in model.parameters())
    for name, module in calibration.experts.items():
        for key, value in expert_tensors(name, module, calibration, policy):
            writer.add(key, value)
        done += sum(p.numel() * p.element_size() for p in module.parameters())
        if progress is not None:
            progress(done, total)
    inside = tuple(f"{name}." for name in calibration.experts)
    tied = set(getattr(model, "_tied_weights_keys", None) or ()) if model.config.tie_word_embeddings else set()
    for name, value in model.state_dict().items():
        if not name.startswith(inside) and name not in tied:
            writer.add(name, value.to(torch.bfloat16) if value.is_floating_point() else value)
    writer.close(modelopt_config(model.config.to_dict(), left_alone(model, inside), policy == "none"))
    return writer.folder


def left_alone(model: Any, inside: tuple[str, ...]) -> list[str]:
    """Globs of the modules with a weight matrix outside the experts, layer numbers as ``*``."""
    names = {
        re.sub(r"\.[0-9]+\.", ".*.", name)
        for name, module in model.named_modules()
        if isinstance(getattr(module, "weight", None), Tensor) and module.weight.dim() == 2
        and not f"{name}.".startswith(inside)
    }  # fmt: skip
    return sorted(names)
