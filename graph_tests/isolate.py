"""One subprocess a case, with a hard time limit: a hang, a crash or a leaked pool stays in there."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from typing import Any

from graph_tests.source import is_user_file, where_of
from graph_tests.verdict import Check, Report, Status, Verdict, Where, check_from_dict, judge

GRACE_S = 5.0


@dataclasses.dataclass(frozen=True)
class Spec:
    """What the subprocess shall judge: a case of a module or file, or a function and options; plain data only."""

    name: str
    place: str
    case: str = ""
    function: str = ""
    inputs: tuple[str, str] = ("", "")
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    timeout_s: float = 180.0


def run_isolated(spec: Spec) -> Report:
    """Judge one spec in a subprocess; HANG and CRASH are verdicts, and a crash is followed by a static look."""
    report = _run(spec)
    if report.verdict is Verdict.CRASH and report.gpu and "layer static" not in report.why:
        options = {**spec.options, "layers": ["static"]}
        second = _run(dataclasses.replace(spec, options=options, timeout_s=min(spec.timeout_s, 60.0)))
        kept = tuple(c for c in second.checks if c.name == "static")
        report = dataclasses.replace(report, checks=(*report.checks, *kept), opaque=report.opaque or second.opaque)
    return report


def run_many(specs: Iterable[Spec], jobs: int, done: Callable[[Report], None] = lambda r: None) -> list[Report]:
    """Judge several specs, at most ``jobs`` at a time, in order; ``done`` hears of each as it ends."""

    def one(spec: Spec) -> Report:
        report = run_isolated(spec)
        done(report)
        return report

    with concurrent.futures.ThreadPoolExecutor(max_workers=max(1, jobs)) as pool:
        return list(pool.map(one, specs))


def _run(spec: Spec) -> Report:
    with tempfile.TemporaryDirectory(prefix="graph_tests_") as folder:
        paths = {n: os.path.join(folder, n) for n in ("spec", "events", "stack", "output")}
        with open(paths["spec"], "w") as file:
            json.dump(dataclasses.asdict(spec), file)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        command = [sys.executable, "-m", "graph_tests.worker", folder]
        with open(paths["output"], "wb") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
            code = wait_hard(process, spec.timeout_s + GRACE_S)
        return _conclude(spec, code, paths)


def wait_hard(process: subprocess.Popen[bytes], limit_s: float) -> int | None:
    """The exit status, or None when the limit passed and the whole process group was killed."""
    try:
        return process.wait(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _conclude(spec: Spec, code: int | None, paths: dict[str, str]) -> Report:
    events = _events(paths["events"])
    for event in reversed(events):
        if "report" in event:
            return Report.from_dict(event["report"])
    checks = tuple(check_from_dict(e["check"]) for e in events if "check" in e)
    begun = [e["begin"] for e in events if "begin" in e]
    layer = begun[-1] if begun else "start-up"
    gpu = any(e.get("gpu") for e in events)
    tail = _tail(paths["output"])
    loading = next((e["failed"] for e in events if "failed" in e), None)
    if loading is not None:
        verdict, why = Verdict.INCONCLUSIVE, f"the case could not be loaded: {loading}"
    elif code is None:
        where = _stack_where(paths["stack"])
        verdict = Verdict.HANG
        why = f"in layer {layer}, at {where or 'an unknown line'}: no end after {spec.timeout_s:g} s"
    else:
        how = f"signal {-code}" if code < 0 else f"exit status {code}"
        where = _stack_where(paths["output"])
        verdict, why = Verdict.CRASH, f"in layer {layer}, at {where or 'an unknown line'}: the process ended with {how}"
    if verdict is Verdict.HANG and judge(checks, gpu)[0] is Verdict.REFUTED:
        why += "; before that: " + judge(checks, gpu)[1]
    status = Status.INCONCLUSIVE if verdict is Verdict.INCONCLUSIVE else Status.FAIL
    evidence = Check("process", status, why, evidence=(tail,))
    facts: dict[str, str] = next((e["environment"] for e in events if "environment" in e), {})
    seconds = spec.timeout_s if code is None else 0.0
    return Report(spec.name, verdict, why, (*checks, evidence), gpu, environment=facts, seconds=seconds)


def _events(path: str) -> list[dict[str, Any]]:
    if not os.path.exists(path):
        return []
    found = []
    with open(path) as file:
        for text in file:
            try:
                found.append(json.loads(text))
            except json.JSONDecodeError:  # the process died while writing its last line
                break
    return found


def _tail(path: str, length: int = 4000) -> str:
    with open(path, "rb") as file:
        return file.read()[-length:].decode(errors="replace").strip()


def _stack_where(path: str) -> Where | None:
    """The innermost user line in a faulthandler dump; the threads of a dump come innermost call first."""
    if not os.path.exists(path):
        return None
    with open(path) as file:
        for match in re.finditer(r'File "([^"]+)", line (\d+) in (\S+)', file.read()):
            if is_user_file(match[1]):
                return where_of(match[1], int(match[2]), match[3])
    return None
