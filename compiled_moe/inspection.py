"""``compiled-moe inspect``: the survey of a checkpoint as a table, as JSON, as a plot and as a page."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from nvfp4.format import PRECISIONS

from .checkpoint import Checkpoint
from .errors import CompiledMoeError
from .survey import LayerSurvey, Survey, survey
from .terminal import progress

LINES = 40
"""Findings on a terminal; JSON and HTML have all."""
COLUMNS = (
    "layer", "experts", "hidden x inter", "MB", "weight_scale_2", "input_scale", "zero", "subnormal", "saturated",
    "gate/up", "findings",
)  # fmt: skip


@dataclass(frozen=True)
class Request:
    """What to inspect; the options of ``compiled-moe inspect``."""

    folder: str
    precision: str | None = None
    codes: bool = False
    plot: Path | None = None
    html: Path | None = None


def run(request: Request, as_json: bool = False) -> int:
    """Inspect and print; returns the exit code, 1 where something is refused.

    Raises:
        CompiledMoeError: what was asked cannot be done.
    """
    if request.precision not in (None, *PRECISIONS):
        raise CompiledMoeError(f"precision is {request.precision!r}; known are {', '.join(PRECISIONS)}")
    if request.plot is not None and request.plot.suffix not in (".png", ".pdf", ".svg"):
        raise CompiledMoeError(f"--plot {request.plot}: the name must end in .png, .pdf or .svg")
    with progress("reading scales") as bar:
        found = survey(Checkpoint.open(request.folder), request.precision, request.codes, bar)
    if as_json:
        print(json.dumps(found.to_dict(), indent=2, allow_nan=False))
    text = Console(
        file=sys.stderr if as_json else sys.stdout, width=max(150, shutil.get_terminal_size().columns), highlight=False
    )
    text.print(table(found))
    for line in summary(found):
        text.print(Text(line), soft_wrap=True)
    for path, write in ((request.plot, _plot), (request.html, _page)):
        if path is not None:
            try:
                write(found, path)
            except OSError as error:
                raise CompiledMoeError(f"{path} cannot be written: {error}") from error
            text.print(Text(f"wrote {path}"))
    return 0 if found.report.ok else 1


def _plot(found: Survey, path: Path) -> None:
    from .plots import draw

    draw(found, path)


def _page(found: Survey, path: Path) -> None:
    from .page import render

    path.write_text(render(found), encoding="utf-8")


def row(layer: LayerSurvey) -> tuple[str, ...]:
    """One layer as text, in the order of COLUMNS."""
    d = layer.to_dict()
    counts = d["findings"]
    total = max(d["block_scale"]["total"], 1)
    said = [f"{n} {name}{'' if n == 1 else 's'}" for name, n in counts.items() if n]
    return (
        d["layer"],
        str(d["experts"]),
        f"{d['hidden_size']} x {d['intermediate_size']}",
        f"{d['bytes'] / 1e6:.1f}",
        _range(d["weight_scale_2"]),
        _range(d["input_scale"]),
        *(f"{d['block_scale'][name] / total:.2%}" for name in ("zero", "subnormal", "saturated")),
        "" if d["gate_up_ratio"] is None else f"{d['gate_up_ratio']:.3g}",
        ", ".join(said) or "none",
    )


def _range(pair: list[float] | None) -> str:
    return "none" if pair is None else f"{pair[0]:.2e} .. {pair[1]:.2e}"


def table(found: Survey) -> Table:
    """The table of layers."""
    out = Table(box=None, header_style="bold", pad_edge=False)
    for name in COLUMNS:
        out.add_column(name, justify="left" if name in ("layer", "findings") else "right", no_wrap=True)
    for layer in found.layers:
        style = "red" if not layer.report.ok else None
        out.add_row(*(Text(cell) for cell in row(layer)), style=style)
    return out


def summary(found: Survey) -> list[str]:
    """What stands below the table: the format, the findings, and what may serve this."""
    q = found.checkpoint.quantization
    head, *lines = str(found.report).splitlines()
    if len(lines) > LINES:
        lines = [*lines[:LINES], f"  and {len(lines) - LINES} lines more: --json and --html have all"]
    words = {True: "yes", False: "no", None: "not looked at"}
    usable = ", ".join(f"{name} {words[ok]}" for name, ok in found.usable.items())
    return [
        "",
        f"{q.method} {q.algorithm}, {found.checkpoint.nbytes / 1e9:.2f} GB",
        head,
        *lines,
        f"usable as: {usable}",
    ]
