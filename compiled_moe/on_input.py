"""Llama-4's block: the router's weight multiplies the input of an expert, f(p x), not its output."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

ON_INPUT = ("Llama4TextExperts",)
"""Experts of transformers that are called with inputs sorted by expert, already weighted."""


def weighs_input(block: Any) -> bool:
    """Whether this is the block around such experts."""
    return type(block).__name__ == "Llama4TextMoe"


class WeightOnInput(nn.Module):
    """Takes the place of ``Llama4TextMoe``; an expert sees its own tokens, not zeros for all others."""

    def __init__(self, block: Any) -> None:
        """Take over router, experts and shared expert."""
        super().__init__()
        self.router, self.experts, self.shared_expert = block.router, block.experts, block.shared_expert
        self.top_k = block.top_k

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """[..., H] to [tokens, H], and the router's logits [tokens, experts]."""
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        scores, logits = self.router(x)
        ids = logits.topk(self.top_k, dim=1).indices.flatten().unsqueeze(1)
        weights = scores.gather(1, ids.view(-1, self.top_k))
        rows = (x.unsqueeze(1) * weights.unsqueeze(2)).flatten(0, 1)
        routed = self.experts(rows, ids, torch.ones_like(ids, dtype=torch.float32))
        return self.shared_expert(x) + routed.unflatten(0, (-1, self.top_k)).sum(1), logits
