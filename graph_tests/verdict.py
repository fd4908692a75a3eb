"""What a proof says: kinds of fault, findings, checks, and the verdict that is computed from them.

Pure data: importing this file imports neither torch nor CUDA.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Any

SCHEMA_VERSION = 1


class Verdict(StrEnum):
    """The one word for a whole case, worst first."""

    CRASH = "CRASH"
    HANG = "HANG"
    REFUTED = "REFUTED"
    STATIC_REFUTED = "STATIC_REFUTED"
    INCONCLUSIVE = "INCONCLUSIVE"
    STATIC_CLEAN = "STATIC_CLEAN"
    PROVEN = "PROVEN"


class Status(StrEnum):
    """What one layer says."""

    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"
    NOT_RUN = "not run"
    PASS = "pass"


class Kind(StrEnum):
    """What is wrong, in the words that reports, JSON and tests share."""

    HOST_READ = "host read"
    DATA_SHAPE = "data-dependent shape"
    HOST_TO_DEVICE = "host-to-device copy"
    DEVICE_TO_HOST = "device-to-host copy"
    EXPLICIT_SYNC = "explicit sync"
    HOST_CHECK = "host error check"
    CALL_WAITS = "call waits for the device"
    DEVICE_ALLOCATION = "allocation in steady state"
    MEMORY_GROWTH = "memory growth"
    BAKED_SCALAR = "baked scalar"
    BAKED_STATE = "baked host state"
    FROZEN_SOURCE = "frozen host source"
    STREAM_FORK = "stream fork"
    COMPILE_IN_CAPTURE = "compile in capture"
    AUTOTUNE_IN_CAPTURE = "autotune in capture"
    ESCAPED = "escaped work"
    HOST_NODE = "host node"
    TOPOLOGY = "topology depends on data"
    CAPTURE_FAILED = "capture failed"
    DEAD_INPUT = "dead input"
    UNINITIALISED = "uninitialised read"
    NOT_IDEMPOTENT = "not idempotent"
    OUTPUT_ALIAS = "output alias"
    MUTATION = "undeclared mutation"
    STALE_WEIGHTS = "stale weights"
    WRONG_REPLAY = "replay differs from eager"
    FAKE_MISMATCH = "fake mismatch"
    SPECIALISATION = "specialisation"
    ELIMINATED = "op eliminated under compile"
    GRAPH_BREAK = "graph break"
    RECOMPILE = "recompile"
    CUDAGRAPH_SKIPPED = "cudagraph skipped"
    EMPTY_BATCH = "empty batch"
    EXCEPTION = "exception"


@dataclasses.dataclass(frozen=True)
class Where:
    """A line of the user's source: the innermost one, and the lines of the user that led there, as FILE:LINE."""

    file: str
    line: int
    function: str = ""
    text: str = ""
    called_from: tuple[str, ...] = dataclasses.field(default=(), compare=False)

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclasses.dataclass(frozen=True)
class Finding:
    """One fault: kind, operation, line, a line of evidence, and how to mend it."""

    kind: Kind
    operation: str
    where: Where | None
    evidence: str
    cure: str
    count: int = 1
    size: int | None = None

    @property
    def key(self) -> tuple[str, str, str]:
        """Findings of several layers or sizes with the same key are one finding."""
        return (self.kind, self.operation, str(self.where))


@dataclasses.dataclass(frozen=True)
class Check:
    """The result of one layer at one size; ``required`` layers must pass for PROVEN."""

    name: str
    status: Status
    why: str = ""
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()
    size: int | None = None
    required: bool = True
    seconds: float = 0.0

    @property
    def where(self) -> Where | None:
        """The line of the first finding."""
        return self.findings[0].where if self.findings else None


@dataclasses.dataclass(frozen=True)
class Report:
    """Everything that was tried on one callable, and what follows from it."""

    name: str
    verdict: Verdict
    why: str
    checks: tuple[Check, ...]
    gpu: bool
    mode: str = "eager"
    opaque: tuple[str, ...] = ()
    tried: tuple[str, ...] = ()
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    isolated: bool = True
    seconds: float = 0.0

    @property
    def proved(self) -> bool:
        """True for PROVEN and for nothing else."""
        return self.verdict is Verdict.PROVEN

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Findings of all layers and sizes, the same fault once with its largest count."""
        merged: dict[tuple[str, str, str], Finding] = {}
        for finding in (f for c in self.checks for f in c.findings):
            old = merged.get(finding.key)
            if old is None:
                merged[finding.key] = finding
            elif finding.count > old.count:
                merged[finding.key] = dataclasses.replace(old, count=finding.count)
        return tuple(merged.values())

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes of all layers, each once."""
        return tuple(dict.fromkeys(n for c in self.checks for n in c.notes))

    @property
    def sizes(self) -> dict[int, Verdict]:
        """The verdict at each size alone."""
        sizes = sorted({c.size for c in self.checks if c.size is not None})
        shared = [c for c in self.checks if c.size is None]
        return {s: judge([*shared, *(c for c in self.checks if c.size == s)], self.gpu)[0] for s in sizes}

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data; ``schema_version`` changes when a reader would notice."""
        data = dataclasses.asdict(self)
        data["schema_version"] = SCHEMA_VERSION
        data["proved"] = self.proved
        data["findings"] = [dataclasses.asdict(f) for f in self.findings]
        data["sizes"] = {str(size): str(verdict) for size, verdict in self.sizes.items()}
        return data

    def to_json(self, indent: int | None = 2) -> str:
        """The report as a JSON document."""
        return json.dumps(self.to_dict(), indent=indent)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Report:
        """The inverse of :meth:`to_dict`; a ValueError says so when the schema is another."""
        if data.get("schema_version") != SCHEMA_VERSION:
            raise ValueError(
                f"this report has schema version {data.get('schema_version')}, here {SCHEMA_VERSION} is read: "
                "run the case again with the installed version"
            )
        names = {f.name for f in dataclasses.fields(cls)}
        kept = {k: v for k, v in data.items() if k in names}
        kept["verdict"] = Verdict(kept["verdict"])
        kept["checks"] = tuple(check_from_dict(c) for c in kept["checks"])
        kept["opaque"], kept["tried"] = tuple(kept["opaque"]), tuple(kept["tried"])
        return cls(**kept)

    def __str__(self) -> str:
        from graph_tests.render import text

        return text(self)


def check_from_dict(data: dict[str, Any]) -> Check:
    """A check from the dictionary that ``dataclasses.asdict`` made of it."""
    return Check(
        **{
            **data,
            "status": Status(data["status"]),
            "findings": tuple(
                Finding(**{**f, "kind": Kind(f["kind"]), "where": _where_from_dict(f["where"])})
                for f in data["findings"]
            ),
            "notes": tuple(data["notes"]),
            "evidence": tuple(data["evidence"]),
        }
    )


def _where_from_dict(data: dict[str, Any] | None) -> Where | None:
    return Where(**{**data, "called_from": tuple(data.get("called_from", ()))}) if data else None


PROOF_LAYERS = ("run time", "run-ahead", "capture", "replay")


def judge(checks: Sequence[Check], gpu: bool, mode: str = "eager") -> tuple[Verdict, str]:
    """The verdict over all checks, and one sentence of why.

    PROVEN asks for a GPU, for every proof layer to be present, and for every required check to have passed. Nothing
    else is ever called PROVEN: a layer that is missing, was not run, or cannot tell, stands in the way.
    """
    failed = [c for c in checks if c.status is Status.FAIL]
    if failed:
        first = next((c for c in failed if c.findings), failed[0])
        what = f"{first.findings[0].kind}: {first.findings[0].operation}" if first.findings else first.why
        return (Verdict.REFUTED if gpu else Verdict.STATIC_REFUTED), what
    if not gpu:
        static = [c for c in checks if c.name == "static"]
        open_ones = [c for c in static if c.status is not Status.PASS]
        if not static or open_ones:
            return Verdict.INCONCLUSIVE, _first_reason(open_ones) or "the static layer did not run"
        return Verdict.STATIC_CLEAN, "no GPU here: nothing was run, captured or replayed"
    wanted = (*PROOF_LAYERS, "compile") if mode == "compiled" else PROOF_LAYERS
    missing = [name for name in wanted if not any(c.name == name for c in checks)]
    if missing:
        return Verdict.INCONCLUSIVE, f"these layers gave no result: {', '.join(missing)}"
    open_ones = [c for c in checks if c.status is not Status.PASS and (c.required or c.name in wanted)]
    if open_ones:
        return Verdict.INCONCLUSIVE, _first_reason(open_ones)
    return Verdict.PROVEN, "every layer passed"


def _first_reason(checks: Iterable[Check]) -> str:
    for check in checks:
        return f"{check.name}: {check.status} ({check.why})" if check.why else f"{check.name}: {check.status}"
    return ""


def exit_code(reports: Sequence[Report], require_gpu: bool = False) -> int:
    """0 fine, 1 refuted (or hang, crash), 3 inconclusive, or GPU layers demanded and absent; 2 is for usage."""
    bad = {Verdict.REFUTED, Verdict.STATIC_REFUTED, Verdict.HANG, Verdict.CRASH}
    if any(r.verdict in bad for r in reports):
        return 1
    if any(r.verdict is Verdict.INCONCLUSIVE for r in reports) or (require_gpu and any(not r.gpu for r in reports)):
        return 3
    return 0
