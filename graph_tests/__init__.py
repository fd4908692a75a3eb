"""Prove that a callable never makes the CPU wait for the GPU, and that its CUDA-graph replays are right."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graph_tests.case import Case, Routing
    from graph_tests.checking import check
    from graph_tests.verdict import Check, Finding, Kind, Report, Status, Verdict

__all__ = ["Case", "Check", "Finding", "Kind", "Report", "Routing", "Status", "Verdict", "check"]

_HOMES = {"check": "checking", "Case": "case", "Routing": "case"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module graph_tests has no attribute {name!r}; it has {', '.join(__all__)}")
    import importlib

    return getattr(importlib.import_module(f"graph_tests.{_HOMES.get(name, 'verdict')}"), name)
