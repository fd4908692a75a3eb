"""Faults of custom operators that their schema and their fake alone give away; no kernel is run."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._pytree import tree_leaves, tree_map

from graph_tests.cures import cure
from graph_tests.layers.fake_trace import FakeTrace
from graph_tests.verdict import Finding, Kind


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
    batch = _batch_of(args, kwargs)
    if batch is None or batch < 2:
        return ""
    env = ShapeEnv(specialize_zero_one=False, duck_shape=False)
    fake = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
    symbol = _symbol(env, batch)

    def symbolic(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if leaf.dim() and int(leaf.shape[0]) == batch and leaf.is_contiguous():
            return torch.empty((symbol, *(int(s) for s in leaf.shape[1:])), dtype=leaf.dtype, device=leaf.device)
        return torch.empty_strided(
            tuple(int(s) for s in leaf.shape), tuple(leaf.stride()), dtype=leaf.dtype, device=leaf.device
        )

    with torch._C.DisableTorchFunction(), fake:
        new_args, new_kwargs = tree_map(symbolic, (args, kwargs))
        try:
            func(*new_args, **new_kwargs)
        except Exception as error:
            return f"its fake fails when the batch size is symbolic: {str(error).splitlines()[0][:160]}"
    fixed = env._maybe_evaluate_static(symbol.node.expr) if hasattr(env, "_maybe_evaluate_static") else None
    if fixed is not None and fixed.is_number:
        return f"its fake fixes the batch size to {fixed}: every other size recompiles, or keeps a wrong shape"
    return ""


def _batch_of(args: Any, kwargs: Any) -> int | None:
    for leaf in tree_leaves((args, kwargs)):
        if isinstance(leaf, torch.Tensor) and leaf.dim():
            return int(leaf.shape[0])
    return None


def _symbol(env: ShapeEnv, value: int) -> Any:
    from torch._dynamo.source import ConstantSource

    source = ConstantSource("batch")
    made = env.create_symbol(value, source=source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
    return env.create_symintnode(made, hint=value, source=source)
