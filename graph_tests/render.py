"""Reports as text for people: one line a case, and the whole story of one report."""

from __future__ import annotations

from graph_tests.verdict import Report, Status


def line(report: Report) -> str:
    """One line: verdict, name, seconds, and the first thing wrong."""
    first = report.findings[0] if report.findings else None
    story = f"{first.kind}: {first.operation} at {first.where or 'unknown line'}" if first else report.why
    more = f" (+{len(report.findings) - 1} more)" if len(report.findings) > 1 else ""
    return f"{report.verdict:<14} {report.name:<32} {report.seconds:6.1f} s  {story}{more}"


def text(report: Report) -> str:
    """The verdict, findings with their cures, the state of each layer, and what was tried."""
    out = [f"{report.verdict}  {report.name}: {report.why}"]
    for finding in report.findings:
        times = f" ({finding.count} times)" if finding.count > 1 else ""
        at = f" [size {finding.size}]" if finding.size is not None else ""
        out.append(f"  {finding.kind}: {finding.operation}{times}{at}")
        if finding.where is not None:
            out.append(f"    at {finding.where}  {finding.where.text}")
            if finding.where.called_from:
                out.append(f"    called from {', then '.join(finding.where.called_from)}")
        out.append(f"    seen: {finding.evidence}")
        out.append(f"    cure: {finding.cure}")
    sizes = report.sizes
    if sizes:
        out.append("  sizes: " + ", ".join(f"{size} {verdict}" for size, verdict in sizes.items()))
    for check in report.checks:
        if check.name == "lint":
            continue
        at = f" [size {check.size}]" if check.size is not None else ""
        why = f": {check.why}" if check.why and check.status is not Status.FAIL else ""
        out.append(f"  {check.status:<12} {check.name}{at}{why}")
    out += [f"  note: {note}" for note in report.notes]
    if report.opaque and not report.gpu:
        out.append(f"  unproven (opaque): {', '.join(report.opaque)}")
    out += [f"  tried: {tried}" for tried in report.tried]
    if not report.isolated:
        out.append("  run inside this process: the callable cannot be imported by name")
    out.append("  on " + ", ".join(f"{k} {v}" for k, v in report.environment.items()))
    return "\n".join(out)
