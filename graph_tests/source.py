"""From a stack to the line that its author can change."""

from __future__ import annotations

import dataclasses
import functools
import linecache
import os
import sys
import sysconfig
from collections.abc import Callable
from types import CodeType, FrameType, TracebackType

from graph_tests.verdict import Where

_HERE = os.path.dirname(os.path.abspath(__file__))
_OWN_USERS = tuple(os.path.join(_HERE, folder) + os.sep for folder in ("tests", "cases"))
MOST_CALLERS = 4
_PACKAGES = ("torch", "triton", "numpy", "cuda", "_pytest", "pluggy", "functorch", "torchgen", "sympy")


@functools.cache
def is_user_file(file: str) -> bool:
    """True unless the file belongs to Python, to torch and its like, to this tool, or is generated."""
    if file.startswith("<") or "torchinductor_" in file or not file.endswith(".py"):
        return False
    path = os.path.abspath(file)
    if any(path.startswith(root) for root in _loaded_roots()):
        return False
    if path.startswith(_HERE + os.sep):
        return path.startswith(_OWN_USERS)
    for root in {sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"]}:
        if path.startswith(root + os.sep):
            top = path[len(root) + 1 :].split(os.sep)[0].removesuffix(".py")
            return top not in _PACKAGES
    if any(f"{os.sep}{kind}-packages{os.sep}{top}{os.sep}" in path for kind in ("site", "dist") for top in _PACKAGES):
        return False
    return not path.startswith(sysconfig.get_paths()["stdlib"] + os.sep)


def _is_own_file(file: str) -> bool:
    """True for this tool itself, whose tests and cases are users."""
    return os.path.abspath(file).startswith(_HERE + os.sep) and not is_user_file(file)


def _loaded_roots() -> list[str]:
    """Folders of the packages that are no user's code, wherever they were loaded from."""
    files = [getattr(sys.modules.get(name), "__file__", None) for name in ("torch", "triton", "numpy")]
    return [os.path.dirname(os.path.abspath(f)) + os.sep for f in files if f]


@functools.lru_cache(maxsize=4096)
def where_of(file: str, line: int, function: str = "") -> Where:
    """A :class:`Where` with the text of its line."""
    shown = os.path.relpath(file) if os.path.abspath(file).startswith(os.getcwd() + os.sep) else file
    return Where(shown, line, function, linecache.getline(file, line).strip())


Place = tuple[str, int, str]


def where_of_stack(places: list[Place]) -> Where | None:
    """The innermost place, with the others as the lines that it was called from; None when there is none."""
    if not places:
        return None
    outward = tuple(str(where_of(*place)) for place in places[1 : 1 + MOST_CALLERS])
    return dataclasses.replace(where_of(*places[0]), called_from=outward)


def user_places(frame: FrameType | None) -> list[Place]:
    """User lines of a stack, innermost first, out to the callable under test: to where this tool called it."""
    found: list[Place] = []
    while frame is not None:
        file = frame.f_code.co_filename
        if is_user_file(file):
            found.append((file, frame.f_lineno, frame.f_code.co_name))
        elif found and _is_own_file(file):
            break
        frame = frame.f_back
    return found


def user_where(frame: FrameType | None = None) -> Where | None:
    """The innermost user line of a stack (default: the caller's)."""
    return where_of_stack(user_places(frame if frame is not None else sys._getframe(1)))


def where_raised(error: BaseException) -> Where | None:
    """The innermost user line of an exception's traceback."""
    found: list[Place] = []
    tb: TracebackType | None = error.__traceback__
    while tb is not None:
        code = tb.tb_frame.f_code
        if is_user_file(code.co_filename):
            found.insert(0, (code.co_filename, tb.tb_lineno, code.co_name))
        tb = tb.tb_next
    return where_of_stack(found)


def where_defined(fn: Callable[..., object]) -> Where | None:
    """The line where a callable, or the method that calling it runs, is defined."""
    code = code_of(fn)
    if code is None or not is_user_file(code.co_filename):
        return None
    return where_of(code.co_filename, code.co_firstlineno, code.co_name)


def code_of(fn: object) -> CodeType | None:
    """The code object behind functions, methods, partials, modules and other callables; None for builtins."""
    for step in ("_torchdynamo_orig_callable", "_orig_mod", "__wrapped__", "func"):
        inner = getattr(fn, step, None)
        if callable(inner) and inner is not fn:
            return code_of(inner)
    code = getattr(fn, "__code__", None) or getattr(getattr(fn, "__func__", None), "__code__", None)
    if code is not None:
        return code
    called = next((vars(c)["__call__"] for c in type(fn).__mro__ if "__call__" in vars(c)), None)
    method = getattr(type(fn), "forward", None) or called
    return getattr(method, "__code__", None)
