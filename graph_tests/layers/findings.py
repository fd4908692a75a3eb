"""A collector of findings that counts repetitions."""

from __future__ import annotations

import dataclasses

from graph_tests.cures import cure
from graph_tests.verdict import Finding, Kind, Where


class Findings:
    """Findings by key, in the order met; the same one again raises its count."""

    def __init__(self) -> None:
        self._by_key: dict[tuple[str, str, str], Finding] = {}

    def add(self, kind: Kind, operation: str, where: Where | None, evidence: str, cured: str = "") -> None:
        """Record one occurrence."""
        new = Finding(kind, operation, where, evidence, cured or cure(kind, operation))
        old = self._by_key.get(new.key)
        self._by_key[new.key] = dataclasses.replace(old, count=old.count + 1) if old else new

    def extend(self, findings: list[Finding]) -> None:
        """Record finished findings."""
        for finding in findings:
            self._by_key.setdefault(finding.key, finding)

    def at(self, where: Where | None) -> bool:
        """True when something was found at this line already: one line, one story."""
        return where is not None and any(f.where == where for f in self._by_key.values())

    def has(self, *kinds: Kind) -> bool:
        """True when a finding of one of these kinds is there."""
        return any(f.kind in kinds for f in self._by_key.values())

    def __bool__(self) -> bool:
        return bool(self._by_key)

    def tuple(self) -> tuple[Finding, ...]:
        """The findings in the order met."""
        return tuple(self._by_key.values())
