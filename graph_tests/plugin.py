"""The pytest plugin: the ``graph_check`` fixture. Importing this file imports no torch."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of the fixture."""
    group = parser.getgroup("graph_tests", "CUDA-graph safety")
    group.addoption("--graph-tests-require-gpu", action="store_true", help="a static verdict alone fails the test")
    group.addoption("--graph-tests-in-process", action="store_true", help="judge in this process: no hard time limit")
    group.addoption("--graph-tests-child", default="", help="internal: where a child process writes its reports")


@pytest.fixture
def graph_check(request: pytest.FixtureRequest) -> GraphCheck:
    """``graph_check(fn, make_inputs, constants=(), **options)`` fails the test unless the callable is proved.

    Where there is no GPU a clean static verdict is accepted, unless ``--graph-tests-require-gpu`` is given. The test
    runs again in a process of its own, so that closures can be judged too and a hang ends at the time limit.
    """
    return GraphCheck(request)


def load_arguments() -> list[str]:
    """What makes another pytest load this plugin: nothing when it is installed, -p when it is only on the path."""
    installed = any(e.name == "graph_tests" for e in importlib.metadata.entry_points(group="pytest11"))
    return [] if installed else ["-p", "graph_tests.plugin"]


class GraphCheck:
    """What the fixture returns; call it, or use :meth:`report` to judge without failing the test."""

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self._request, self._config = request, request.config
        self._reports: list[dict[str, Any]] | None = None
        self._next = 0

    def __call__(self, fn: Callable[..., Any], make_inputs: Callable[..., Any], **options: Any) -> Any:
        """Judge ``fn`` and fail the test with the report's text unless it is proved."""
        __tracebackhide__ = True
        report = self.report(fn, make_inputs, **options)
        static_is_enough = not report.gpu and not self._config.getoption("--graph-tests-require-gpu")
        if not report.proved and not (report.verdict == "STATIC_CLEAN" and static_is_enough):
            pytest.fail(str(report), pytrace=False)
        return report

    def report(self, fn: Callable[..., Any], make_inputs: Callable[..., Any], **options: Any) -> Any:
        """Judge ``fn`` and return the report, whatever it says."""
        child = self._config.getoption("--graph-tests-child")
        if child or self._config.getoption("--graph-tests-in-process"):
            report = self._here(fn, make_inputs, options, child)
        else:
            report = self._from_child(fn, options)
        self._request.node.user_properties.append(("graph_tests", f"{report.verdict}: {report.why}"))
        return report

    def _here(self, fn: Callable[..., Any], make: Callable[..., Any], options: dict[str, Any], child: str) -> Any:
        from graph_tests.checking import check

        report = check(fn, make, isolate=False, **options)
        if child:
            with open(child, "a") as file:
                file.write(json.dumps(report.to_dict()) + "\n")
        return report

    def _from_child(self, fn: Callable[..., Any], options: dict[str, Any]) -> Any:
        from graph_tests.verdict import Report

        if self._reports is None:
            self._reports, self._end = self._run_child(float(options.get("timeout_s", 180.0)))
        if self._next >= len(self._reports):
            verdict, why = self._end
            return Report(getattr(fn, "__name__", "callable"), verdict, why, (), gpu=True)
        self._next += 1
        return Report.from_dict(self._reports[self._next - 1])

    def _run_child(self, timeout_s: float) -> tuple[list[dict[str, Any]], tuple[Any, str]]:
        """Run this very test in a process of its own; its reports, and how it ended if one is missing."""
        from graph_tests.isolate import wait_hard
        from graph_tests.verdict import Verdict

        with tempfile.TemporaryDirectory(prefix="graph_tests_") as folder:
            out, log = os.path.join(folder, "reports"), os.path.join(folder, "log")
            command = [
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "-p",
                "no:cacheprovider",
                f"--rootdir={self._config.rootpath}",
            ]
            command += load_arguments()
            if self._config.inipath is not None:
                command += ["-c", str(self._config.inipath)]
            node = self._request.node
            path, _, rest = node.nodeid.partition("::")
            command += [f"--graph-tests-child={out}", f"{self._config.rootpath / path}::{rest}"]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
            with open(log, "wb") as output:
                process = subprocess.Popen(
                    command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
                )
                code = wait_hard(process, timeout_s)
            reports = []
            if os.path.exists(out):
                with open(out) as file:
                    reports = [json.loads(text) for text in file]
            with open(log, errors="replace") as file:
                tail = file.read()[-2000:]
        if code is None:
            return reports, (Verdict.HANG, f"the test's own process did not end within {timeout_s:g} s")
        return reports, (Verdict.CRASH, f"the test's own process ended with status {code} before it reported: {tail}")
