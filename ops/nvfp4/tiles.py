"""Which tile shapes the portable kernels use: a pure function of shapes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tile:
    """Block sizes of one GEMM launch: rows of tokens, rows of weights, elements along K."""

    m: int
    n: int
    k: int
    warps: int
    stages: int

    def key(self) -> tuple[int, ...]:
        """For caches of what has been compiled."""
        return (self.m, self.n, self.k, self.warps, self.stages)


def choose(rows: int, groups: int, k: int) -> Tile:
    """A tile for ``rows`` routed rows spread over ``groups`` experts, reducing over k.

    Few rows per expert: thin tiles and deep K, since reading weights is the work. Many: square tiles.
    """
    # Not 16: bfloat16 and float16 products came out wrong there on an H200 (Triton 3.6), float32 ones right.
    block_k = 128 if k % 128 == 0 else 64 if k >= 64 else 32
    mean = rows / max(groups, 1)
    if mean <= 24:
        return Tile(16, 64, block_k, 4, 3)
    if mean <= 48:
        return Tile(32, 64, block_k, 4, 3)
    if mean <= 96:
        return Tile(64, 64, min(block_k, 64), 4, 3)
    return Tile(128, 64, min(block_k, 64), 8, 3)
