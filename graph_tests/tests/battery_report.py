"""What the battery writes and prints."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
from collections import Counter
from collections.abc import Callable
from typing import Any

from graph_tests import render
from graph_tests.verdict import SCHEMA_VERSION, Report, Status

SHOWN = 900
PRINTED = 9_000


@dataclasses.dataclass
class Suite:
    """The reports of one suite, how to judge them, and how long all of it took."""

    name: str
    reports: dict[str, Report]
    judge: Callable[[Report], list[str]]
    seconds: float
    extra: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def gpu(self) -> bool:
        """True when something was judged on a GPU."""
        return any(r.gpu for r in self.reports.values())

    @property
    def bad(self) -> dict[str, list[str]]:
        """What is not as it must be."""
        wrong = {n: self.judge(r) for n, r in self.reports.items()} | {n: [s] for n, s in self.extra.items() if s}
        return {n: said for n, said in wrong.items() if said}


def story(report: Report) -> str:
    """Everything known about one report, evidence and tracebacks included."""
    parts = [render.text(report)]
    for check in report.checks:
        if check.status is not Status.NOT_RUN and check.evidence:
            shown = "\n    ".join(text.strip().replace("\n", "\n    ") for text in check.evidence)
            parts.append(f"  evidence of {check.name} [{check.size}] ({check.status}, {check.seconds} s):\n    {shown}")
    return "\n".join(parts)


def write(folder: str, suites: list[Suite], timings: dict[str, float], jobs: int) -> None:
    """One JSON file a suite, and one text with every story, mismatches first."""
    if not folder:
        return
    os.makedirs(folder, exist_ok=True)
    for suite in suites:
        with open(os.path.join(folder, f"{suite.name}.json"), "w") as file:
            json.dump(document(suite, timings, jobs), file, indent=1)
    with open(os.path.join(folder, "evidence.txt"), "w") as file:
        told = [(s.bad.get(n, []), s.name, n, r) for s in suites for n, r in s.reports.items()]
        for said, suite_name, name, report in sorted(told, key=lambda t: (not t[0], t[1])):
            file.write(f"=== {suite_name}: {name}: {'; '.join(said) or 'as it must be'}\n{story(report)}\n\n")


def document(suite: Suite, timings: dict[str, float], jobs: int) -> dict[str, Any]:
    """A suite as plain data: where and when it ran, and every report."""
    from graph_tests.engine import environment

    return {
        "schema_version": SCHEMA_VERSION,
        "suite": suite.name,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": os.environ.get("COMMIT", ""),
        "environment": environment(),
        "jobs": jobs,
        "seconds": round(suite.seconds, 1),
        "timings": timings,
        "verdicts": dict(Counter(r.verdict for r in suite.reports.values())),
        "mismatches": suite.bad,
        "extra": {n: s or "ok" for n, s in suite.extra.items()},
        "reports": [suite.reports[n].to_dict() for n in sorted(suite.reports)],
    }


def show(suites: list[Suite], timings: dict[str, float]) -> None:
    """A line a suite, a line a mismatch, and as much of their stories as a terminal keeps."""
    for suite in suites:
        verdicts = ", ".join(f"{count} {v}" for v, count in Counter(r.verdict for r in suite.reports.values()).items())
        total = len(suite.reports) + len(suite.extra)
        right = total - len(suite.bad)
        print(f"{suite.name}: {right} of {total} as they must be, {suite.seconds:.0f} s ({verdicts})")
        slow = sorted(suite.reports.values(), key=lambda r: -r.seconds)[:3]
        print("  slowest: " + ", ".join(f"{r.name} {r.seconds:.0f} s" for r in slow))
    print(", ".join(f"{k} {v}" for k, v in timings.items()))
    left = PRINTED
    for suite in suites:
        for name, said in suite.bad.items():
            head = f"BAD {suite.name}: {name}: {'; '.join(said)[:300]}"
            told = f"{head}\n{_short(story(suite.reports[name]))}" if name in suite.reports else head
            print(told if left > len(told) else head)
            left -= len(told)


def _short(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[: 2 * SHOWN // 3]}\n    [...]\n{text[-SHOWN // 3 :]}"
