"""Layer shapes of published models, and what a layer costs at least."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """One mixture-of-experts layer: hidden size, expert width, experts, experts a token."""

    hidden: int
    inter: int
    experts: int
    top_k: int

    @property
    def expert_bytes(self) -> float:
        """NVFP4 bytes of one expert: three matrices at 4.5 bits a weight."""
        return 3 * self.hidden * self.inter * 0.5625

    def floor_us(self, tokens: int, touched: int, bytes_per_s: float, flops_per_s: float) -> float:
        """Least time: every touched expert and every activation moved once, or all products, whichever is longer."""
        moved = touched * self.expert_bytes + 4 * tokens * self.hidden
        flops = 6 * self.hidden * self.inter * tokens * self.top_k
        return max(moved / bytes_per_s, flops / flops_per_s) * 1e6


SHAPES = {
    "Qwen3-30B-A3B": Shape(2048, 768, 128, 8),
    "Qwen3-235B-A22B": Shape(4096, 1536, 128, 8),
    "gpt-oss-120b": Shape(2880, 2880, 128, 4),
    "Mixtral-8x7B": Shape(4096, 14336, 8, 2),
    "DeepSeek-V3": Shape(7168, 2048, 256, 8),
    "I=1856": Shape(2688, 1856, 128, 6),
}
TOKENS = (1, 4, 16, 64, 256, 1024, 4096)
