"""Regressions planted in the MoE operator itself: each must be refuted, or the proofs of the suite are worth nothing.

Each callable puts its fault into the launcher for the length of one call, and takes it out again.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

import nvfp4  # noqa: F401 (registers the operators)
from graph_tests.case import Case
from graph_tests.cases.nvfp4 import EXPERTS, TOP_K, layer

SIZE = 64
launcher = importlib.import_module("nvfp4.operators.moe")


class Planted:
    """The operator with one attribute of its launcher, or of its kernels, replaced while it is called."""

    owner: Any = launcher
    name = "_launch"

    def __init__(self) -> None:
        self.real = getattr(self.owner, self.name)
        self.state: Any = None

    def __call__(self, *args: torch.Tensor) -> torch.Tensor:
        """Call the operator with the fault in place."""
        with mock.patch.object(self.owner, self.name, self.put_in()):
            return torch.ops.nvfp4.moe(*args)

    def put_in(self) -> Any:
        """What stands in for the real attribute."""
        return self.fault

    def fault(self, *args: Any, **constants: Any) -> Any:
        """The real function with its fault."""
        raise NotImplementedError


class HostRead(Planted):
    """Looks at the largest expert id on the host."""

    def fault(self, out, health, x, ids, *args, **constants):
        """The launcher, after a look at the ids."""
        if ids.max().item() < EXPERTS:  #
            self.real(out, health, x, ids, *args, **constants)


class HostGrid(Planted):
    """Sizes the grid of the second GEMM by the counts per expert that the first call met."""

    owner, name = launcher.kernels, "gemm2"

    def __call__(self, *args: torch.Tensor) -> torch.Tensor:
        """The first call reads the counts."""
        if self.state is None:
            self.state = torch.bincount(args[1].flatten(), minlength=EXPERTS).tolist()
        return super().__call__(*args)

    def put_in(self) -> Any:
        """The kernel with another grid."""
        return _Launches(self._smaller)

    def _smaller(self, grid: tuple[int, int]) -> Callable[..., None]:
        def launch(*args: Any, BLOCK_M: int, **constants: Any) -> None:
            blocks = sum(-(-count // BLOCK_M) for count in self.state)
            self.real[(grid[0], min(grid[1], blocks))](*args, BLOCK_M=BLOCK_M, **constants)

        return launch


class DefaultStream(Planted):
    """Launches the last kernel on the default stream."""

    owner, name = launcher.kernels, "sum_slots"

    def put_in(self) -> Any:
        """The kernel on another stream."""
        return _Launches(self._elsewhere)

    def _elsewhere(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **constants: Any) -> None:
            with torch.cuda.stream(torch.cuda.default_stream()):
                self.real[grid](*args, **constants)

        return launch


class Workspace(Planted):
    """Returns rows of one buffer that all calls share."""

    name = "_fake"

    def fault(self, *args, **constants):
        """Rows of the buffer."""
        fresh = self.real(*args, **constants)
        if self.state is None:
            self.state = fresh.new_empty((4096, fresh.shape[1]))
        return self.state[: fresh.shape[0]]


class NotReset(Planted):
    """Sums the slots into a buffer that nobody sets to zero."""

    def fault(self, out, *args, **constants):
        """The launcher, then the sum of all calls."""
        self.real(out, *args, **constants)
        if self.state is None:
            self.state = torch.zeros_like(out, dtype=torch.float32)
        out.copy_(self.state.add_(out))


class _Launches:
    """A kernel whose launches, ``kernel[grid](...)``, another function makes."""

    def __init__(self, make: Callable[[Any], Callable[..., None]]) -> None:
        self._make = make

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self._make(grid)


def crowded_first(seed: int) -> tuple[Any, ...]:
    """A layer whose first routing needs the fewest blocks: all tokens go to the same experts."""
    x, ids, *rest = layer(seed, SIZE)
    if seed == 0:
        ids = torch.arange(TOP_K, device=x.device, dtype=ids.dtype).repeat(SIZE, 1)
    return x, ids, *rest


def inputs(seed: int) -> tuple[Any, ...]:
    """A layer of the suite."""
    return layer(seed, SIZE)


def cases() -> Iterator[Case]:
    """One case a fault."""
    yield Case("planted-host-read", inputs, build=HostRead)
    yield Case("planted-host-grid", crowded_first, build=HostGrid)
    yield Case("planted-default-stream", inputs, build=DefaultStream)
    yield Case("planted-workspace", inputs, build=Workspace)
    yield Case("planted-not-reset", inputs, build=NotReset)
