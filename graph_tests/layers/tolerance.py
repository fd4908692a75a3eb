"""When two results are the same: bits first, and the callable's own noise where it has any."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from graph_tests.inputs import tensors

# Rounding that a different but legal order of the same sums may cause, in units of the dtype's eps at the largest
# value: cuBLAS may pick another split inside a capture. Faults that matter here are larger by orders of magnitude.
ROUNDING = 8.0
NOISE_FACTOR = 8.0
# Atomics add in any order: float32 sums of ten thousand terms stay below 512 eps of the largest value; narrow types
# would allow anything by that rule, so it ends at 3 %.
ATOMICS = 512.0
MOST_ATOMICS = 0.03


@dataclasses.dataclass(frozen=True)
class Difference:
    """The worst disagreement of two results; ``moved`` when it is too large for the noise of atomics."""

    tensor: int
    index: tuple[int, ...]
    left: float
    right: float
    share: float
    moved: bool

    def __str__(self) -> str:
        at = f"output {self.tensor}{list(self.index)}"
        return f"{at}: {self.left:.6g} against {self.right:.6g}; {self.share:.1%} of the elements differ"


def difference(left: Any, right: Any, noise: list[float] | None = None) -> Difference | None:
    """The worst disagreement of two nested results beyond rounding and ``noise``; None when they agree.

    ``noise`` is the largest absolute spread that each output tensor shows by itself, as :func:`spread` measures it.
    """
    one, two = tensors(left), tensors(right)
    if len(one) != len(two):
        return Difference(min(len(one), len(two)), (), float(len(one)), float(len(two)), 1.0, True)
    for position, (a, b) in enumerate(zip(one, two, strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype:
            return Difference(position, (), float(a.numel()), float(b.numel()), 1.0, True)
        found = _compare(position, a, b, noise[position] if noise else 0.0)
        if found is not None:
            return found
    return None


def spread(results: list[Any]) -> list[float]:
    """For each output tensor the largest absolute spread over repeated results, NaN-free."""
    base = tensors(results[0])
    worst = [0.0] * len(base)
    for other in results[1:]:
        for position, (a, b) in enumerate(zip(base, tensors(other), strict=False)):
            if a.shape == b.shape and a.is_floating_point() and a.numel():
                gap = (_wide(a) - _wide(b)).abs().nan_to_num(0.0, 0.0, 0.0)
                worst[position] = max(worst[position], float(gap.max()))
    return worst


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit equality, NaN equal to NaN of the same bits."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.numel():
        return True
    left, right = a.detach().contiguous(), b.detach().contiguous()
    if left.is_complex():
        left, right = torch.view_as_real(left), torch.view_as_real(right)
    return bool(torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8)))


def _compare(position: int, a: torch.Tensor, b: torch.Tensor, noise: float) -> Difference | None:
    if same_bits(a, b):
        return None
    x, y = _wide(a), _wide(b)
    both_nan = x.isnan() & y.isnan()
    limit = movement = 0.0
    if a.is_floating_point() or a.is_complex():
        largest = float(x.abs().nan_to_num(0.0, 0.0, 0.0).max())
        eps = torch.finfo(a.dtype).eps
        limit = max(ROUNDING * eps * largest, NOISE_FACTOR * noise)
        movement = min(ATOMICS * eps, MOST_ATOMICS) * largest
    gap = (x - y).abs()
    wrong = ~((gap <= limit) | both_nan | (x == y))
    if not bool(wrong.any()):
        return None
    worst = torch.where(wrong, gap.nan_to_num(float("inf")), -1.0)
    flat = int(worst.reshape(-1).argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), x.shape))
    left, right = float(x.reshape(-1)[flat]), float(y.reshape(-1)[flat])
    moved = float(worst.max()) > movement
    return Difference(position, index, left, right, float(wrong.double().mean()), moved)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.detach().double()
