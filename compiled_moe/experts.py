"""Modules for people with their own model: experts, and a whole mixture-of-experts block."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nvfp4 import ExpertWeights, health, route


class NVFP4Experts(nn.Module):
    """Routed experts on ``torch.ops.nvfp4.moe``; the call of transformers' experts modules.

    The tensors are buffers: a compiled graph treats their addresses as fixed, ``weights.update_`` keeps them.
    """

    def __init__(self, weights: ExpertWeights) -> None:
        """Take finalized weights."""
        super().__init__()
        self.weights = weights
        for name, tensor in weights.tensors.items():
            self.register_buffer(name, tensor, persistent=False)
        self.health: Tensor | None
        self.register_buffer("health", None, persistent=False)

    @property
    def num_experts(self) -> int:
        """Experts held here."""
        return self.weights.spec.num_experts

    def _apply(self, fn, recurse=True):
        """Follow ``.to(device)``, leaving every dtype as it is: scales are not activations."""

        def move(t: Tensor) -> Tensor:
            return t.to(fn(t).device)

        super()._apply(move, recurse)
        self.weights.tensors = {name: getattr(self, name) for name in self.weights.tensors}
        return self

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Weighted sum over the chosen experts.

        Args:
            hidden_states: [tokens, H]. top_k_index: int32 or int64 [tokens, k]. top_k_weights: [tokens, k].

        Returns:
            [tokens, H] in hidden_states' dtype.
        """
        return self.weights(hidden_states, top_k_index, top_k_weights.to(torch.float32), health=self.health)

    def extra_repr(self) -> str:
        """One line for print(model)."""
        s = self.weights.spec
        return (
            f"experts={s.num_experts}, hidden={s.hidden_size}, intermediate={s.intermediate_size}, "
            f"{s.activation}, {self.weights.precision}, {self.weights.backend}"
        )


class NVFP4MoE(nn.Module):
    """Router and experts: x -> route(x W_router) -> experts."""

    def __init__(self, router: Tensor, experts: NVFP4Experts, top_k: int, **routing) -> None:
        """Take the router weight [experts, H] and the keyword arguments of ``nvfp4.route``."""
        super().__init__()
        self.router: Tensor
        self.register_buffer("router", router)
        self.experts, self.top_k, self.routing = experts, top_k, routing

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] to [..., H]; logits in x's dtype, weights in float32."""
        rows = x.reshape(-1, x.shape[-1])
        ids, weights = route(rows @ self.router.T, top_k=self.top_k, **self.routing)
        return self.experts(rows, ids, weights).reshape(x.shape)


def experts_of(model: nn.Module) -> dict[str, NVFP4Experts]:
    """The experts modules of a model by name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, NVFP4Experts)}


def enable_health(model: nn.Module) -> Tensor:
    """Count what passes every experts layer, inside graphs too.

    Call it before compiling. Read rows with ``nvfp4.health.read``.

    Returns:
        int64 [layers, fields + experts], zeroed; row i belongs to the i-th of ``experts_of(model)``.
    """
    layers = list(experts_of(model).values())
    if not layers:
        raise ValueError("this model has no NVFP4Experts; load it with compiled_moe.load")
    device = next(iter(layers[0].weights.tensors.values())).device
    rows = health.buffer(len(layers), max(layer.num_experts for layer in layers), device)
    for row, layer in zip(rows, layers, strict=True):
        layer.health = row[: health.COUNTERS + layer.num_experts]
    return rows
