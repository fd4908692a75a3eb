"""Faults of custom operators that their schema and their fake alone give away; no kernel is run."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._pytree import tree_leaves, tree_map

from graph_tests.cures import cure
from graph_tests.layers.fake_trace import FakeTrace
from graph_tests.verdict import Finding, Kind

MOST_SUBSETS = 64


def check_fakes(trace: FakeTrace, mode: str, notes: list[str]) -> list[Finding]:
    """Findings about the opaque operators that a trace met: eliminated under compile, specialised on the batch."""
    found = []
    for name, (func, args, kwargs, where) in trace.custom_calls.items():
        vanishing = vanishes(func)
        if vanishing and mode == "compiled":
            found.append(Finding(Kind.ELIMINATED, name, where, vanishing, cure(Kind.ELIMINATED)))
        elif vanishing:
            notes.append(f"{name}: {vanishing}")
        special = specialises(func, args, kwargs)
        if special:
            found.append(Finding(Kind.SPECIALISATION, name, where, special, cure(Kind.SPECIALISATION)))
    return found


def vanishes(func: Any) -> str:
    """Why a compiler may drop the operator, or an empty string."""
    schema = getattr(func, "_schema", None)
    if schema is None or schema.returns or schema.is_mutable:
        return ""
    from torch._higher_order_ops.effects import _get_effect

    try:
        effect = _get_effect(func)
    except (AttributeError, TypeError, KeyError):
        effect = None
    if effect is not None:
        return ""
    return f"{schema.name} returns nothing and declares no argument as written: torch.compile removes the call"


def specialises(func: Any, args: Any, kwargs: Any) -> str:
    """Run the fake with a symbolic batch size; why it fixes the size to one number, or an empty string."""
    with torch._C.DisableTorchFunction():
        batch, together = _batch_tensors(func, args, kwargs)
    if not together:
        return ""
    env = ShapeEnv(specialize_zero_one=False, duck_shape=False)
    symbol = _symbol(env, batch)
    why = _fake_call(func, args, kwargs, together, symbol, env)
    if why:
        return f"its fake fails when the batch size is symbolic: {why}"
    fixed = env._maybe_evaluate_static(symbol.node.expr) if hasattr(env, "_maybe_evaluate_static") else None
    if fixed is not None and fixed.is_number:
        return f"its fake fixes the batch size to {fixed}: every other size recompiles, or keeps a wrong shape"
    return ""


def _batch_tensors(func: Any, args: Any, kwargs: Any) -> tuple[int, tuple[int, ...]]:
    """The batch size, and the positions of the tensors that hold it; no positions where they cannot be known.

    The batch is the leading size of the first tensor. A bias over 64 experts has that leading size too in a batch of
    64: so the tensors taken are the largest set, the first one always among them, that the fake accepts at another
    batch size.
    """
    leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    first = next((i for i, leaf in enumerate(leaves) if leaf.dim()), None)
    if first is None or int(leaves[first].shape[0]) < 2:
        return 0, ()
    batch = int(leaves[first].shape[0])
    others = [i for i, leaf in enumerate(leaves) if i != first and leaf.dim() and int(leaf.shape[0]) == batch]
    subsets = (s for n in range(len(others), -1, -1) for s in itertools.combinations(others, n))
    for subset in itertools.islice(subsets, MOST_SUBSETS):
        together = (first, *subset)
        # Some operators ask for even sizes or more: either of two other sizes will do.
        if any(not _fake_call(func, args, kwargs, together, size) for size in (batch + 1, 2 * batch)):
            return batch, together
    return batch, ()


def _fake_call(
    func: Any, args: Any, kwargs: Any, together: tuple[int, ...], size: Any, env: ShapeEnv | None = None
) -> str:
    """Run the fake with another leading size in some tensors; the first line of its complaint, or an empty string."""
    fake = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
    position = itertools.count()

    def resized(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        sizes: list[Any] = [int(s) for s in leaf.shape]
        dense = leaf.is_contiguous()
        if next(position) in together:
            sizes[0] = size
        if dense:
            return torch.empty(sizes, dtype=leaf.dtype, device=leaf.device)
        return torch.empty_strided(sizes, leaf.stride(), dtype=leaf.dtype, device=leaf.device)

    with torch._C.DisableTorchFunction(), fake:
        new_args, new_kwargs = tree_map(resized, (args, kwargs))
        try:
            func(*new_args, **new_kwargs)
        except Exception as error:
            return (str(error).strip() or type(error).__name__).splitlines()[0][:160]
    return ""


def _symbol(env: ShapeEnv, value: int) -> Any:
    from torch._dynamo.source import ConstantSource

    source = ConstantSource("batch")
    made = env.create_symbol(value, source=source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
    return env.create_symintnode(made, hint=value, source=source)
