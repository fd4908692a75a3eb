"""From a name on the command line to cases, and from a function to a name that another process can import."""

from __future__ import annotations

import importlib
import importlib.util
import os
import pkgutil
import sys
from types import ModuleType
from typing import Any

from graph_tests.case import Case, cases_of


class UsageError(ValueError):
    """The target named on the command line is not there; the text says what is."""


def load(target: str) -> ModuleType:
    """Import a module by name or from a file."""
    if not target.endswith(".py"):
        try:
            return importlib.import_module(target)
        except ModuleNotFoundError as error:
            if error.name is not None and (target == error.name or target.startswith(error.name + ".")):
                there = ", ".join(suites()) or "none here"
                raise UsageError(
                    f"there is no module {target!r}: give a module, a file that ends in .py, or a suite ({there})"
                ) from error
            raise
    path = os.path.abspath(target)
    if not os.path.exists(path):
        raise UsageError(f"there is no file {target}")
    name = "graph_tests_target_" + os.path.basename(path).removesuffix(".py")
    if name in sys.modules and getattr(sys.modules[name], "__file__", None) == path:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{target} cannot be imported as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def suites() -> list[str]:
    """Names of the suites in graph_tests.cases."""
    return sorted(set(_suite_of_module().values()))


def _suite_of_module() -> dict[str, str]:
    """The suite of each module of graph_tests.cases: ``a_part`` belongs to ``a`` where there is a module ``a``."""
    import graph_tests.cases

    names = sorted(m.name for m in pkgutil.iter_modules(graph_tests.cases.__path__))
    return {name: next(other for other in names if name == other or name.startswith(other + "_")) for name in names}


def resolve(target: str) -> list[tuple[str, Case]]:
    """``pkg.module``, ``FILE.py``, either with ``:case``, or the name of a suite, as (module or file, case) pairs."""
    place, _, name = target.partition(":")
    if place in suites():
        places = [f"graph_tests.cases.{m}" for m, suite in _suite_of_module().items() if suite == place]
    else:
        places = [place]
    found = [(p, c) for p in places for c in cases_of(load(p))]
    if name:
        chosen = [(p, c) for p, c in found if c.name == name]
        if not chosen:
            raise UsageError(f"{place} has no case {name!r}; it has {', '.join(c.name for _, c in found) or 'none'}")
        return chosen
    if not found:
        raise UsageError(f"{place} holds no cases: make one with @case(make_inputs), from graph_tests.case")
    return found


def find(place: str, name: str) -> Case:
    """One case of one module or file."""
    return resolve(f"{place}:{name}")[0][1]


def locate(thing: Any) -> tuple[str, str] | None:
    """(module or file, qualified name) under which another process finds the very same object; None if it cannot."""
    qualname, module_name = getattr(thing, "__qualname__", None), getattr(thing, "__module__", None)
    module = sys.modules.get(module_name or "")
    if qualname is None or module is None or "<locals>" in qualname or "<lambda>" in qualname:
        return None
    if lookup(module, qualname) is not thing:
        return None
    if module_name == "__main__":
        file = getattr(module, "__file__", None)
        return (os.path.abspath(file), qualname) if file and file.endswith(".py") else None
    spec = getattr(module, "__spec__", None)
    if spec is None or importlib.util.find_spec(module_name) is None:  # type: ignore[arg-type]
        file = getattr(module, "__file__", None)
        return (os.path.abspath(file), qualname) if file and file.endswith(".py") else None
    return module_name, qualname  # type: ignore[return-value]


def lookup(module: ModuleType, qualname: str) -> Any:
    """An attribute by dotted name; None where there is none."""
    thing: Any = module
    for part in qualname.split("."):
        thing = getattr(thing, part, None)
    return thing
