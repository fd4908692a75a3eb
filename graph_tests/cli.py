"""``graph-tests``: judge cases from the command line.

Exit codes: 0 fine, 1 refuted (also hang and crash), 2 usage, 3 inconclusive, or GPU layers demanded and absent.
"""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from graph_tests.case import Case
from graph_tests.verdict import SCHEMA_VERSION, Report, Verdict, exit_code

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)

Targets = Annotated[list[str], typer.Argument(help="pkg.module[:case], FILE.py[:case], or the name of a suite")]


@app.command()
def run(
    targets: Targets,
    as_json: Annotated[bool, typer.Option("--json", help="the reports as one JSON document on stdout")] = False,
    require_gpu: Annotated[bool, typer.Option("--require-gpu", help="exit 3 when there is no GPU")] = False,
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, help="cases judged at the same time")] = 1,
    timeout: Annotated[float | None, typer.Option("--timeout", min=1.0, help="seconds for each case")] = None,
    layer: Annotated[list[str] | None, typer.Option("--layer", help="only these; proves nothing")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="every layer of every case")] = False,
) -> None:
    """Judge every case of the targets, each in its own process; one line a case."""
    from graph_tests.isolate import Spec, run_many

    chosen = _resolve(targets)
    options = {"layers": _layers(layer)} if layer else {}
    specs = [
        Spec(case.name, place, case=case.name, options=options, timeout_s=timeout or case.timeout_s)
        for place, case in chosen
    ]
    reports = run_many(specs, jobs, lambda report: _show(report, as_json, verbose))
    if as_json:
        document = {"schema_version": SCHEMA_VERSION, "reports": [r.to_dict() for r in reports]}
        typer.echo(json.dumps(document, indent=2))
    _summary(reports)
    code = exit_code(reports, require_gpu)
    if code == 3 and require_gpu and any(not r.gpu for r in reports):
        typer.echo("the GPU layers were demanded and this machine has no GPU", err=True)
    raise typer.Exit(code)


@app.command("list")
def list_cases(
    targets: Annotated[list[str] | None, typer.Argument(help="as for run; without any, the suites")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="as JSON on stdout")] = False,
) -> None:
    """List the cases of the targets, or the suites that come with this installation."""
    if not targets:
        from graph_tests.discover import suites

        typer.echo(json.dumps(suites()) if as_json else "\n".join(suites()))
        return
    chosen = _resolve(targets)
    rows = [{"place": p, "case": c.name, "mode": c.mode, "sizes": list(c.sizes)} for p, c in chosen]
    typer.echo(json.dumps(rows, indent=2) if as_json else "\n".join(f"{r['place']}:{r['case']}" for r in rows))


def _resolve(targets: list[str]) -> list[tuple[str, Case]]:
    from graph_tests.discover import UsageError, resolve

    try:
        return [pair for target in targets for pair in resolve(target)]
    except (UsageError, ValueError, ImportError) as error:
        typer.echo(f"graph-tests: {error}", err=True)
        raise typer.Exit(2) from error


def _layers(names: list[str]) -> list[str]:
    from graph_tests.case import LAYERS

    unknown = [n for n in names if n not in LAYERS]
    if unknown:
        typer.echo(f"graph-tests: no such layer: {', '.join(unknown)}; there are {', '.join(LAYERS)}", err=True)
        raise typer.Exit(2)
    return names


def _show(report: Report, as_json: bool, verbose: bool) -> None:
    from graph_tests import render

    bad = report.verdict not in (Verdict.PROVEN, Verdict.STATIC_CLEAN)
    typer.echo(render.text(report) if verbose or (bad and not as_json) else render.line(report), err=as_json)


def _summary(reports: list[Report]) -> None:
    counts = {v: sum(r.verdict is v for r in reports) for v in Verdict}
    typer.echo(", ".join(f"{n} {v}" for v, n in counts.items() if n), err=True)


def main() -> None:
    """Entry point of the command."""
    if "" not in sys.path:
        sys.path.insert(0, "")  # as python -m does: modules of the working directory can be named
    app()


if __name__ == "__main__":
    main()
