"""Judge everything on this machine: the table of verdicts, callables of other people, and the suite of nvfp4.

    COMMIT=$(git rev-parse HEAD) python -m graph_tests.tests.gpu_battery --out FOLDER [--jobs N] [--only NAME ...]

Writes battery.json, third_party.json, nvfp4.json and evidence.txt (mismatches first), and prints what is not as it
must be. Cases run side by side, each in a process of its own. That makes calls slower, and no verdict wrong: whether a
call ran ahead is read from the gate that held its stream, never from a clock, and a gate that ended by itself is tried
again with a longer limit.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from graph_tests import discover, render
from graph_tests.isolate import Spec, run_isolated, run_many
from graph_tests.tests import battery_report, table
from graph_tests.tests.battery_report import Suite
from graph_tests.verdict import Report, Status, Verdict

PLACE = "graph_tests.tests.table"
CAPTURES = 50
LEAK_LIMIT = 64 << 20
BUDGET_S = 285.0
SLOW = ("hang", "many-launches")
OTHERS_REFUTED = ("eager-experts", "growing-mask")


def judge_specs(specs: Sequence[Spec], jobs: int, deadline: float) -> dict[str, Report]:
    """Reports by name; nothing begins after the deadline, and nothing lasts beyond it."""

    def one(spec: Spec) -> Report:
        left = deadline - time.monotonic()
        if left < 5.0:
            return Report(spec.name, Verdict.INCONCLUSIVE, "not begun: the battery's time was up", (), gpu=True)
        return run_isolated(Spec(spec.name, spec.place, case=spec.case, timeout_s=min(spec.timeout_s, left)))

    with concurrent.futures.ThreadPoolExecutor(max_workers=max(1, jobs)) as pool:
        return dict(zip((s.name for s in specs), pool.map(one, specs), strict=True))


def table_specs(names: Sequence[str]) -> list[Spec]:
    """Cases of the table, the slow ones first."""
    wanted = table.expected()
    slow_first = sorted(names, key=lambda n: (wanted[n].case.mode != "compiled", n not in SLOW))
    return [Spec(n, PLACE, case=n, timeout_s=wanted[n].case.timeout_s) for n in slow_first]


def suite_specs(suite: str) -> list[Spec]:
    """Cases of a suite, the compiled ones first."""
    pairs = sorted(discover.resolve(suite), key=lambda pair: pair[1].mode != "compiled")
    return [Spec(case.name, place, case=case.name, timeout_s=case.timeout_s) for place, case in pairs]


def judge_all(names: Sequence[str], jobs: int, budget_s: float = BUDGET_S) -> dict[str, Report]:
    """The reports of cases of the table."""
    return judge_specs(table_specs(names), jobs, time.monotonic() + budget_s)


def refuted_captures(jobs: int, count: int = CAPTURES) -> str:
    """Fifty captures that fail must leave the device's memory where it was; what is wrong, or an empty string."""
    import torch

    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    options = {"layers": ["capture"]}
    specs = [
        Spec(f"capture-{i}", PLACE, case="retried-captures", options=options, timeout_s=60.0) for i in range(count)
    ]
    reports = run_many(specs, jobs)
    lost = before - torch.cuda.mem_get_info()[0]
    refuted = sum(r.verdict is Verdict.REFUTED for r in reports)
    if refuted != count:
        other = next(r for r in reports if r.verdict is not Verdict.REFUTED)
        return f"{count - refuted} of {count} captures were not refuted: {render.text(other)}"
    return f"{count} refuted captures kept {lost:,} bytes of device memory" if lost > LEAK_LIMIT else ""


def profiler_attached() -> str:
    """With another profiler attached the run-time layer says not run; what is wrong, or an empty string."""
    command = [sys.executable, "-m", "graph_tests.tests.attached"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)
    if done.returncode:
        return f"the process ended with {done.returncode}: {done.stderr[-1500:]}"
    report = Report.from_dict(json.loads(done.stdout.strip().splitlines()[-1]))
    layer = next((c for c in report.checks if c.name == "run time"), None)
    if layer is None or layer.status is not Status.NOT_RUN or report.verdict is not Verdict.INCONCLUSIVE:
        return f"run time must say not run, and the verdict must be INCONCLUSIVE: {render.text(report)}"
    return ""


def timings() -> dict[str, float]:
    """Seconds of one whole check of a small callable, its process included, and of a static one after import."""
    import dataclasses

    from graph_tests.checking import check
    from graph_tests.engine import run_case
    from graph_tests.tests import faulty, sound

    began = time.monotonic()
    check(sound.masked_fill, faulty.make)
    whole = time.monotonic() - began
    case = dataclasses.replace(table.expected()["moe"].case, layers=("lint", "static"))
    began = time.monotonic()
    run_case(case)
    return {"single_check_s": round(whole, 2), "static_check_s": round(time.monotonic() - began, 2)}


def main() -> int:
    """Run, print, write; exit status 1 when anything is not as it must be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="")
    parser.add_argument("--jobs", type=int, default=max(2, (os.cpu_count() or 4) - 2))
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds after which nothing begins")
    parser.add_argument("--only", nargs="*", default=[], help="these cases, of whatever suite")
    chosen = parser.parse_args()
    # The cores go to the cases: each would otherwise start a compile worker for every core.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    deadline = time.monotonic() + chosen.budget
    suites: list[Suite] = []
    for names in (("battery", "third_party"), ("nvfp4",)):
        suites += _judge(names, chosen.only, chosen.jobs, deadline)
        battery_report.write(chosen.out, suites, {}, chosen.jobs)
    more: dict[str, float] = {}
    if any(s.gpu for s in suites) and not chosen.only:
        first = suites[0]
        first.extra["profiler-attached"] = _attempt(profiler_attached)
        first.extra["fifty-refuted-captures"] = _attempt(lambda: refuted_captures(chosen.jobs))
        more = timings()
    battery_report.write(chosen.out, suites, more, chosen.jobs)
    battery_report.show(suites, more)
    return int(any(s.bad for s in suites))


def _judge(names: Sequence[str], only: Sequence[str], jobs: int, deadline: float) -> list[Suite]:
    """Several suites side by side."""
    by_suite = {n: table_specs(list(table.expected())) if n == "battery" else suite_specs(n) for n in names}
    kept = {n: [s for s in specs if not only or s.name in only] for n, specs in by_suite.items()}
    began = time.monotonic()
    reports = judge_specs([s for specs in kept.values() for s in specs], jobs, deadline)
    seconds = time.monotonic() - began
    return [
        Suite(name, {s.name: reports[s.name] for s in specs}, _judgement(name), seconds)
        for name, specs in kept.items()
        if specs
    ]


def _judgement(suite: str) -> Callable[[Report], list[str]]:
    """What a report of a suite gets wrong."""
    if suite == "battery":
        wanted = table.expected()
        return lambda report: table.mismatches(wanted[report.name], report, report.gpu)

    def wrong(report: Report) -> list[str]:
        must = Verdict.REFUTED if report.name in OTHERS_REFUTED else Verdict.PROVEN
        if not report.gpu:
            must = Verdict.STATIC_REFUTED if report.name in OTHERS_REFUTED else Verdict.STATIC_CLEAN
        return [] if report.verdict is must else [f"verdict is {report.verdict}, it must be {must}"]

    return wrong


def _attempt(trial: Callable[[], str]) -> str:
    """The trial's answer; when the trial itself breaks, that is the answer, and the table is still printed."""
    try:
        return trial()
    except (RuntimeError, OSError, subprocess.SubprocessError, ValueError) as error:
        return f"the trial itself failed: {type(error).__name__}: {str(error)[:300]}"


if __name__ == "__main__":
    sys.exit(main())
