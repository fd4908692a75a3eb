"""What is judged: a callable, the inputs to judge it with, and what its author promises."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

MODES = ("eager", "compiled")
LAYERS = ("lint", "custom ops", "run time", "run-ahead", "capture", "replay", "compile", "static")


@dataclasses.dataclass(frozen=True)
class Routing:
    """Which argument holds expert ids, so that the prover can try the extremes of routing by itself.

    ``ids`` and ``rows`` are positions in the arguments. ``padded`` and ``nan_rows`` promise that ids of -1, and rows
    of NaN, are legal inputs; without the promise they are not tried.
    """

    ids: int
    num_experts: int
    rows: int | None = None
    padded: bool = False
    nan_rows: bool = False
    duplicates: bool = True


@dataclasses.dataclass(frozen=True)
class Case:
    """One callable to prove.

    ``make_inputs(seed)`` returns the arguments as a tuple: same shapes for every seed, other values, other routing.
    With ``sizes`` it is called as ``make_inputs(seed, size)`` and each size is judged. ``build()`` makes the callable
    in the process that judges it, when it needs a device or time; give ``fn`` or ``build``. ``warm_sizes`` are the
    sizes that get a warm-up before capture (default: all). ``constants`` are argument positions, argument names or
    tensors whose values never change. Mode "compiled" also asks for torch.compile(mode="reduce-overhead") to have
    really used graphs.
    """

    name: str
    make_inputs: Callable[..., Any]
    fn: Callable[..., Any] | None = None
    build: Callable[[], Callable[..., Any]] | None = None
    constants: tuple[Any, ...] = ()
    sizes: tuple[int, ...] = ()
    warm_sizes: tuple[int, ...] | None = None
    mode: str = "eager"
    routing: Routing | None = None
    layers: tuple[str, ...] = LAYERS
    timeout_s: float = 180.0
    tags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if (self.fn is None) == (self.build is None):
            raise ValueError(f"case {self.name!r}: give exactly one of fn and build")
        if self.mode not in MODES:
            raise ValueError(f"case {self.name!r}: mode is {self.mode!r}, it must be one of {', '.join(MODES)}")
        unknown = [layer for layer in self.layers if layer not in LAYERS]
        if unknown:
            raise ValueError(f"case {self.name!r}: no such layer: {unknown}; there are {', '.join(LAYERS)}")
        stray = set(self.warm_sizes or ()) - set(self.sizes)
        if stray:
            raise ValueError(f"case {self.name!r}: warm_sizes {sorted(stray)} are not in sizes {self.sizes}")

    def callable(self) -> Callable[..., Any]:
        """The callable itself, built now if the case builds it late."""
        return self.fn if self.fn is not None else self.build()  # type: ignore[misc]


def case(make_inputs: Callable[..., Any], *, name: str | None = None, **options: Any) -> Callable[..., Case]:
    """Decorator: turn a function into a :class:`Case` of the module it stands in."""

    def wrap(fn: Callable[..., Any]) -> Case:
        return Case(name=name or fn.__name__.replace("_", "-"), make_inputs=make_inputs, fn=fn, **options)

    return wrap


def cases_of(module: Any) -> list[Case]:
    """All cases of a module: its attributes that are cases, then those that its ``cases()`` returns."""
    found = [value for value in vars(module).values() if isinstance(value, Case)]
    more: Sequence[Case] | None = module.cases() if callable(getattr(module, "cases", None)) else None
    found += list(more or ())
    names = [c.name for c in found]
    twice = sorted({n for n in names if names.count(n) > 1})
    if twice:
        raise ValueError(f"{module.__name__}: several cases are called {', '.join(twice)}; names must differ")
    return found
