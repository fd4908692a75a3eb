"""``check``: judge one callable, in a process of its own whenever that process can import it."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

from graph_tests.case import Case
from graph_tests.discover import locate
from graph_tests.verdict import Report

inside_worker = False


def check(
    fn: Callable[..., Any],
    make_inputs: Callable[..., Any],
    constants: tuple[Any, ...] = (),
    *,
    name: str | None = None,
    isolate: bool = True,
    **options: Any,
) -> Report:
    """Judge a callable and return the :class:`~graph_tests.verdict.Report`.

    ``make_inputs(seed)`` returns the arguments as a tuple: same shapes for every seed, other values. ``constants``
    are argument positions, argument names or tensors that never change. ``options`` are the other fields of
    :class:`~graph_tests.case.Case`: sizes, warm_sizes, mode, routing, layers, timeout_s.

    A function that can be imported by name is judged in a subprocess, where a hang or a crash does no harm; anything
    else (a closure, a module object) is judged here, and the report says so. ValueError for options that make no
    sense.
    """
    case = Case(
        name=name or str(getattr(fn, "__name__", type(fn).__name__)),
        make_inputs=make_inputs,
        fn=fn,
        constants=tuple(constants),
        **options,
    )
    if inside_worker:
        raise RuntimeError(
            "check() was called while a subprocess of check() imported this file: put the call under "
            '`if __name__ == "__main__":`, or pass isolate=False'
        )
    spec = spec_of(case) if isolate else None
    if spec is not None:
        from graph_tests.isolate import run_isolated

        return run_isolated(spec)
    from graph_tests.engine import run_case

    return run_case(case, isolated=False)


def spec_of(case: Case) -> Any:
    """The case as plain data for a subprocess, or None when something in it cannot be imported by name."""
    from graph_tests.isolate import Spec

    function, inputs = locate(case.fn), locate(case.make_inputs)
    if function is None or inputs is None:
        return None
    plain = [c for c in case.constants if isinstance(c, int | str)]
    held = [c for c in case.constants if not isinstance(c, int | str)]
    names = [_global_name(c, (case.fn, case.make_inputs)) for c in held]
    if any(n is None for n in names):
        return None
    options: dict[str, Any] = {
        "constants": plain,
        "constant_tensors": names,
        "sizes": case.sizes,
        "warm_sizes": case.warm_sizes,
        "mode": case.mode,
        "layers": case.layers,
        "routing": dataclasses.asdict(case.routing) if case.routing else None,
        "timeout_s": case.timeout_s,
    }
    return Spec(case.name, function[0], function=function[1], inputs=inputs, options=options, timeout_s=case.timeout_s)


def _global_name(thing: Any, owners: tuple[Any, ...]) -> tuple[str, str] | None:
    for owner in owners:
        module = sys.modules.get(getattr(owner, "__module__", ""))
        place = locate(owner)
        for name, value in vars(module).items() if module is not None else ():
            if value is thing and place is not None:
                return place[0], name
    return None
