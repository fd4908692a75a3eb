"""Runs the layers of one case in this process and computes the verdict."""

from __future__ import annotations

import contextlib
import dataclasses
import platform
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch

from graph_tests.case import Case
from graph_tests.cures import cure
from graph_tests.inputs import describe, routings
from graph_tests.source import where_defined, where_raised
from graph_tests.verdict import Check, Finding, Kind, Report, Status, Verdict, judge

Emit = Callable[[dict[str, Any]], None]


class DeviceLost(Exception):
    """The CUDA context no longer works: an out-of-bounds access, a device assert."""

    def __init__(self, layer: str, error: BaseException) -> None:
        super().__init__(f"{type(error).__name__}: {(str(error).strip() or '(no text)').splitlines()[0]}")
        self.layer = layer
        self.where = where_raised(error)


def run_case(case: Case, emit: Emit = lambda event: None, isolated: bool = True) -> Report:
    """Judge one case here and now; ``emit`` hears of each layer before and after it runs."""
    began = time.monotonic()
    gpu = torch.cuda.is_available()
    run = _Run(case, gpu, emit)
    lost: DeviceLost | None = None
    try:
        run.all_sizes()
    except DeviceLost as error:
        lost = error
    verdict, why = judge(run.checks, gpu, case.mode)
    if lost is not None:
        verdict, why = Verdict.CRASH, f"in layer {lost.layer} at {lost.where or 'an unknown line'}: {lost}"
    return Report(
        name=case.name,
        verdict=verdict,
        why=why,
        checks=tuple(run.checks),
        gpu=gpu,
        mode=case.mode,
        opaque=tuple(dict.fromkeys(run.opaque)),
        tried=tuple(run.tried),
        environment=environment(),
        isolated=isolated,
        seconds=round(time.monotonic() - began, 2),
    )


def environment() -> dict[str, str]:
    """What this was run on."""
    import importlib.metadata

    facts = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("triton", "cuda-bindings"):
        try:
            facts[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            facts[name] = "absent"
    if torch.cuda.is_available():
        with contextlib.suppress(RuntimeError):  # a lost device no longer says its name
            facts["gpu"] = torch.cuda.get_device_name()
            facts["capability"] = ".".join(str(n) for n in torch.cuda.get_device_capability())
    return facts


class _Run:
    """The state of one run: checks so far, and how to attempt one more."""

    def __init__(self, case: Case, gpu: bool, emit: Emit) -> None:
        self.case, self.gpu, self.emit = case, gpu, emit
        self.checks: list[Check] = []
        self.opaque: list[str] = []
        self.tried: list[str] = []

    def all_sizes(self) -> None:
        """Build the callable, then judge it at each size."""
        try:
            fn = self.case.callable()
        except Exception as error:
            why = f"the callable could not be built: {_short(error)}"
            self._add(Check("build", Status.INCONCLUSIVE, why, evidence=(traceback.format_exc()[-4000:],)))
            return
        if "lint" in self.case.layers:
            from graph_tests.layers.lint import check_lint

            self.attempt("lint", None, lambda: check_lint(fn), required=False)
        for size in self.case.sizes or (None,):
            if self.gpu and set(self.case.layers) - {"lint", "static"}:
                self._on_gpu(fn, size)
            if "static" in self.case.layers:
                self.attempt("static", size, lambda size=size: self._static(fn, size), required=not self.gpu)  # type: ignore[misc]
        if not self.gpu:
            for layer in ("run time", "run-ahead", "capture", "replay"):
                if layer in self.case.layers:
                    self._add(Check(layer, Status.NOT_RUN, "no GPU on this machine", required=False))

    def _static(self, fn: Callable[..., Any], size: int | None) -> Check:
        from graph_tests.layers.static import check_static

        check, opaque = check_static(self.case, fn, size)
        self.opaque += opaque
        if not self.gpu:
            self.tried.append("fake tensors of seeds 0 and 1" + (f" at size {size}" if size is not None else ""))
        return check

    def _on_gpu(self, fn: Callable[..., Any], size: int | None) -> None:
        from graph_tests.layers.bench import Bench, UserError

        try:
            bench = Bench(self.case, fn, size)
            self.emit({"begin": "warm-up", "size": size})
            bench.warm_up()
        except UserError as error:
            self._raised(fn, size, error)
            return
        except Exception as error:
            self._sticky("warm-up", error)
            trace = (traceback.format_exc()[-4000:],)
            self._add(Check("run time", Status.INCONCLUSIVE, _short(error), evidence=trace, size=size))
            return
        at = f"size {size}: " if size is not None else ""
        extremes = f"; routings {', '.join(routings(self.case.routing))}" if self.case.routing else ""
        self.tried.append(f"{at}{describe(bench.args)}; seeds 0 to 3{extremes}")
        for name, layer in bench.layers():
            if name in self.case.layers:
                self.attempt(name, size, layer)
        bench.close()

    def _raised(self, fn: Callable[..., Any], size: int | None, error: Any) -> None:
        """The callable raised in a plain eager call."""
        cause = error.__cause__ or error
        self._sticky("warm-up", cause)
        kind = Kind.EMPTY_BATCH if size == 0 else Kind.EXCEPTION
        where = where_raised(cause) or where_defined(fn)
        finding = Finding(kind, type(cause).__name__, where, _short(cause), cure(kind), size=size)
        self._add(Check("run time", Status.FAIL, "the callable raised in an eager call", (finding,), size=size))

    def attempt(self, name: str, size: int | None, layer: Callable[[], Check], required: bool = True) -> None:
        """Run a layer; when the layer itself raises, it says inconclusive and why, and never passes."""
        self.emit({"begin": name, "size": size})
        began = time.monotonic()
        try:
            check = layer()
        except Exception as error:
            self._sticky(name, error)
            why = f"the layer itself failed: {_short(error)}"
            check = Check(name, Status.INCONCLUSIVE, why, evidence=(traceback.format_exc()[-4000:],))
        findings = tuple(dataclasses.replace(f, size=size) for f in check.findings)
        self._add(
            dataclasses.replace(
                check,
                size=size,
                findings=findings,
                required=check.required and required,
                seconds=round(time.monotonic() - began, 3),
            )
        )
        self._sticky(name, None)

    def _sticky(self, layer: str, error: BaseException | None) -> None:
        """Raise DeviceLost when the context is gone; that outlives any single call."""
        if not self.gpu:
            return
        try:
            torch.cuda.synchronize()
        except Exception as broken:
            raise DeviceLost(layer, error if error is not None else broken) from broken

    def _add(self, check: Check) -> None:
        self.checks.append(check)
        self.emit({"check": dataclasses.asdict(check)})


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or '(no text)').splitlines()[0][:300]}"
