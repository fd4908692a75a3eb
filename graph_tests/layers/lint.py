"""Lint layer: reads the callable's own source for habits that go wrong under capture. Notes only, never a verdict.

Misses everything that the callable calls.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

from graph_tests.source import code_of
from graph_tests.verdict import Check, Status

_NOTES = {
    "is_current_stream_capturing": "asks whether a capture is under way: what it does then was never warmed up",
    "print": "prints: a tensor printed is a host read, and a replay prints nothing",
    "random.": "uses Python's random numbers: a graph keeps the ones of the capture",
    "numpy.random": "uses NumPy's random numbers: a graph keeps the ones of the capture",
    "time.": "reads a clock on the host: a graph keeps the time of the capture",
}


def check_lint(fn: Callable[..., Any]) -> Check:
    """Notes about the source of ``fn``; "not run" where there is no source."""
    code = code_of(fn)
    if code is None:
        return Check("lint", Status.NOT_RUN, "the callable has no Python source", required=False)
    try:
        lines, first = inspect.getsourcelines(code)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, SyntaxError, TypeError, IndentationError):
        return Check("lint", Status.NOT_RUN, "the callable's source cannot be read", required=False)
    notes = tuple(f"{code.co_filename}:{first + line - 1} {text}" for line, text in _scan(tree))
    return Check("lint", Status.PASS, notes=notes, required=False)


def _scan(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = _dotted(node.func)
            if name == "print":
                yield node.lineno, _NOTES["print"]
            elif name.endswith("is_current_stream_capturing"):
                yield node.lineno, _NOTES["is_current_stream_capturing"]
            elif name.startswith("random."):
                yield node.lineno, _NOTES["random."]
            elif name.startswith(("np.random.", "numpy.random.")):
                yield node.lineno, _NOTES["numpy.random"]
            elif name.startswith("time.") and name != "time.sleep":
                yield node.lineno, _NOTES["time."]


def _dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return ""
