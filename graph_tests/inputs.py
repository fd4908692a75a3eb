"""Arguments for a callable: made by seed and size, cloned, refilled in place, with the extremes of routing."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from graph_tests.case import Case, Routing


class InputError(ValueError):
    """The inputs themselves do not fit: the text says how."""


class InputMaker:
    """Calls ``make_inputs`` and keeps the promises of ``constants``."""

    def __init__(self, case: Case, fn: Callable[..., Any], size: int | None) -> None:
        self.case, self.size = case, size
        self._positions = [self._position(fn, c) for c in case.constants if isinstance(c, int | str)]
        self._held = [(t, t.clone()) for t in case.constants if isinstance(t, torch.Tensor)]
        self._kept: dict[int, Any] = {}
        stray = [c for c in case.constants if not isinstance(c, int | str | torch.Tensor)]
        if stray:
            raise InputError(f"constants holds {stray[0]!r}: give argument positions, argument names or tensors")

    def make(self, seed: int, routing: str = "") -> tuple[Any, ...]:
        """Arguments for one seed; ``routing`` names one of :func:`routings`."""
        made = self.case.make_inputs(seed) if self.size is None else self.case.make_inputs(seed, self.size)
        args = made if isinstance(made, tuple) else (made,)
        for position in self._positions:
            if position >= len(args):
                raise InputError(f"constants names argument {position}, but make_inputs gives {len(args)} arguments")
            self._kept.setdefault(position, args[position])
            args = (*args[:position], self._kept[position], *args[position + 1 :])
        for tensor, value in self._held:
            tensor.copy_(value)
        if routing and self.case.routing is not None:
            args = reroute(args, self.case.routing, routing)
        return args

    @staticmethod
    def _position(fn: Callable[..., Any], constant: int | str) -> int:
        if isinstance(constant, int):
            return constant
        names = list(inspect.signature(fn).parameters)
        if constant not in names:
            raise InputError(f"constants names {constant!r}, but the callable's arguments are {', '.join(names)}")
        return names.index(constant)

    def notes(self) -> list[str]:
        """What is taken on trust."""
        return [f"argument {p} is taken as constant, as constants= says" for p in self._positions] + [
            f"a tensor of shape {tuple(t.shape)} is taken as constant, as constants= says" for t, _ in self._held
        ]


def routings(routing: Routing | None) -> list[str]:
    """Names of the routing extremes that a case allows."""
    if routing is None:
        return []
    names = ["balanced", "all-to-one", "reversed", "empty-expert"]
    names += ["duplicate"] if routing.duplicates else []
    names += ["padded"] if routing.padded else []
    names += ["nan-row"] if routing.nan_rows and routing.rows is not None else []
    return names


def reroute(args: tuple[Any, ...], routing: Routing, name: str) -> tuple[Any, ...]:
    """The same arguments with other expert ids (or, for "nan-row", a row of NaN)."""
    ids = args[routing.ids]
    if not isinstance(ids, torch.Tensor):
        raise InputError(f"routing.ids is argument {routing.ids}, which is no tensor")
    experts, width = routing.num_experts, ids.shape[-1] if ids.dim() > 1 else 1
    flat = torch.arange(ids.numel(), device=ids.device)
    first = torch.arange(width, device=ids.device).repeat(max(ids.numel() // max(width, 1), 0))[: ids.numel()]
    new = {
        "balanced": flat % experts,
        "all-to-one": first % experts,
        "reversed": (experts - 1 - flat % experts),
        "empty-expert": flat % max(experts - 1, 1),
        "duplicate": torch.div(flat, max(width, 1), rounding_mode="floor") % experts,
        "padded": torch.where(torch.div(flat, max(width, 1), rounding_mode="floor") % 2 == 0, flat % experts, -1),
        "nan-row": ids.reshape(-1),
    }[name]
    out = list(args)
    out[routing.ids] = new.reshape(ids.shape).to(ids.dtype)
    if name == "nan-row" and routing.rows is not None:
        rows = args[routing.rows].clone()
        if rows.shape[0]:
            rows[0].fill_(float("nan"))
        out[routing.rows] = rows
    return tuple(out)


def tensors(tree: Any) -> list[torch.Tensor]:
    """The tensors of a nested structure, in order."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def clone_tree(tree: Any) -> Any:
    """A copy of the structure with fresh tensors of the same strides."""
    return tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf, tree)


def refill(static: Any, new: Any) -> None:
    """Copy new values into the static buffers, as a deployment does before each replay."""
    for old, value in pairs(static, new):
        old.copy_(value)


def pairs(static: Any, new: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Corresponding tensors of two argument lists; an InputError where they do not correspond."""
    left, right = tensors(static), tensors(new)
    if len(left) != len(right):
        raise InputError(f"make_inputs gave {len(left)} tensors for one seed and {len(right)} for another")
    for index, (a, b) in enumerate(zip(left, right, strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
            raise InputError(
                f"tensor {index} of make_inputs is {tuple(a.shape)} {a.dtype} on {a.device} for one seed and "
                f"{tuple(b.shape)} {b.dtype} on {b.device} for another: seeds change values, never shapes"
            )
        yield a, b


def describe(args: Any) -> str:
    """Shapes and dtypes of the arguments, for the verdict."""
    return ", ".join(
        f"{str(t.dtype).removeprefix('torch.')}[{','.join(str(s) for s in t.shape)}]" for t in tensors(args)
    )
