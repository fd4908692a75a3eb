"""How large the inputs of each expert's projections are over some text, and which experts the text never reached."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .errors import CheckpointError

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
        """Stop watching, and let go of the model."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.experts.clear()

    @torch.no_grad()
    def _watch(self, name: str, module: Any, x: Tensor, ids: Tensor, *_) -> None:
        for e in ids.unique().tolist():
            if not 0 <= e < module.down_proj.shape[0]:
                continue  # padding
            rows = x[(ids == e).any(1)]
            h = module._apply_gate(rows @ module.gate_up_proj[e].T)
            for store, value in ((self.input_amax, rows), (self.hidden_amax, h)):
                amax = float(value.abs().max())
                if not amax < float("inf"):
                    raise CheckpointError(
                        f"{name}, expert {e}: an input is {amax} during calibration; a scale cannot be made of that. "
                        "The model is broken on this text: compare it with its producer before it is quantised"
                    )
                store[name][e] = max(float(store[name][e]), amax)
            self.tokens[name][e] += rows.shape[0]

    def amax(self, name: str, projection: str, policy: str = "per_expert") -> Tensor:
        """Input magnitudes of one projection, [experts], negative where there shall be no scale.

        Args:
            name: the experts module. projection: of an expert. policy: "per_expert" or "layer_max".
        """
        seen = (self.hidden_amax if projection == "down_proj" else self.input_amax)[name]
        return seen if policy == "per_expert" else torch.full_like(seen, float(seen.max()))


def _is_experts(module: nn.Module) -> bool:
    return all(isinstance(getattr(module, n, None), nn.Parameter) for n in ("gate_up_proj", "down_proj"))
