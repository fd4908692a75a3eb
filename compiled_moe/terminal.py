"""What a person at a terminal sees beside the result: bars there, nothing elsewhere."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress(what: str, counted: bool = True) -> Iterator[Callable[[int, int], None] | None]:
    """A bar on stderr where that is a terminal; yields a function of (done, total), or None.

    Args:
        what: in front of the bar. counted: done and total are bytes.
    """
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = [
        SpinnerColumn(),
        TextColumn(what),
        BarColumn(),
        *([DownloadColumn()] if counted else []),
        TimeElapsedColumn(),
    ]
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
