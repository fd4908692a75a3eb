"""Judge every case of the table on this machine, many at a time, and print what does not get its verdict.

    python -m graph_tests.tests.gpu_battery --out results.json [--jobs N] [--only NAME ...]

The JSON holds every report; beside it a .txt file holds the whole story of each mismatch.
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
from typing import Any

from graph_tests import render
from graph_tests.isolate import Spec, run_isolated, run_many
from graph_tests.tests import table
from graph_tests.verdict import SCHEMA_VERSION, Report, Status, Verdict

PLACE = "graph_tests.tests.table"
CAPTURES = 50
LEAK_LIMIT = 64 << 20
SHOWN = 1100
BUDGET_S = 270.0
LIMITS_S = {"eager": 90.0, "compiled": 220.0}


def judge_all(names: Sequence[str], jobs: int, budget_s: float = BUDGET_S) -> dict[str, Report]:
    """Reports by name; the slow ones begin first, and nothing begins after the budget."""
    wanted = table.expected()
    slow_first = sorted(names, key=lambda n: (wanted[n].case.mode != "compiled", n != "hang", n != "many-launches"))
    deadline = time.monotonic() + budget_s

    def one(name: str) -> Report:
        case = wanted[name].case
        left = deadline - time.monotonic()
        if left < 5.0:
            return Report(name, Verdict.INCONCLUSIVE, "not begun: the battery's time was up", (), gpu=True)
        limit = min(case.timeout_s, LIMITS_S[case.mode], left)
        return run_isolated(Spec(name, PLACE, case=name, timeout_s=limit))

    with concurrent.futures.ThreadPoolExecutor(max_workers=max(1, jobs)) as pool:
        return dict(zip(slow_first, pool.map(one, slow_first), strict=True))


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


def story(report: Report) -> str:
    """Everything known about one report, evidence and tracebacks included."""
    parts = [render.text(report)]
    for check in report.checks:
        if check.status is not Status.NOT_RUN and check.evidence:
            shown = "\n    ".join(text.strip().replace("\n", "\n    ") for text in check.evidence)
            parts.append(f"  evidence of {check.name} [{check.size}] ({check.status}, {check.seconds} s):\n    {shown}")
    return "\n".join(parts)


def main() -> int:
    """Run, print, write; the number of mismatches is the exit status, at most 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="")
    parser.add_argument("--jobs", type=int, default=max(2, (os.cpu_count() or 4) - 4))
    parser.add_argument("--only", nargs="*", default=[])
    chosen = parser.parse_args()
    wanted = {n: e for n, e in table.expected().items() if not chosen.only or n in chosen.only}
    began = time.monotonic()
    reports = judge_all(list(wanted), chosen.jobs)
    gpu = any(r.gpu for r in reports.values())
    wrong = {n: table.mismatches(wanted[n], r, gpu) for n, r in reports.items()}
    extra: dict[str, str] = {}
    if chosen.out:
        _write(chosen.out, reports, wrong, extra)
    if gpu and not chosen.only:
        extra["profiler-attached"] = _attempt(profiler_attached)
        extra["fifty-refuted-captures"] = _attempt(lambda: refuted_captures(chosen.jobs))
    _print(wanted, reports, wrong, extra, gpu, time.monotonic() - began)
    if chosen.out:
        _write(chosen.out, reports, wrong, extra)
    return int(any(wrong.values()) or any(extra.values()))


def _attempt(trial: Callable[[], str]) -> str:
    """The trial's answer; when the trial itself breaks, that is the answer, and the table is still printed."""
    try:
        return trial()
    except (RuntimeError, OSError, subprocess.SubprocessError, ValueError) as error:
        return f"the trial itself failed: {type(error).__name__}: {str(error)[:300]}"


def _print(
    wanted: dict[str, table.Expected],
    reports: dict[str, Report],
    wrong: dict[str, list[str]],
    extra: dict[str, str],
    gpu: bool,
    seconds: float,
) -> None:
    for name, expected in wanted.items():
        if name in reports:
            must = expected.verdict if gpu else expected.static
            mark = "BAD" if wrong[name] else "ok "
            print(f"{mark} {name:<22} must {must:<14} got {reports[name].verdict:<14} {reports[name].seconds:6.1f} s")
    for name, said in extra.items():
        print(f"{'BAD' if said else 'ok '} {name:<22} {said[:SHOWN]}")
    for name, faults in wrong.items():
        if faults:
            print(f"\n=== {name}: {'; '.join(faults)}\n{_short(story(reports[name]))}")
    bad = sum(map(bool, wrong.values())) + sum(map(bool, extra.values()))
    print(f"\n{len(reports) + len(extra) - bad} of {len(reports) + len(extra)} as they must be, {seconds:.0f} s")


def _short(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[: SHOWN // 2]}\n    [...]\n{text[-SHOWN // 2 :]}"


def _write(path: str, reports: dict[str, Report], wrong: dict[str, list[str]], extra: dict[str, str]) -> None:
    document: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "mismatches": {n: s for n, s in wrong.items() if s} | {n: [s] for n, s in extra.items() if s},
        "extra": {n: s or "ok" for n, s in extra.items()},
        "reports": [reports[n].to_dict() for n in sorted(reports)],
    }
    with open(path, "w") as file:
        json.dump(document, file, indent=1)
    with open(os.path.splitext(path)[0] + ".txt", "w") as file:
        for name in sorted(reports, key=lambda n: not wrong[n]):
            said = "; ".join(wrong[name]) or "as it must be"
            file.write(f"=== {name}: {said}\n{story(reports[name])}\n\n")


if __name__ == "__main__":
    sys.exit(main())
