"""A survey as one self-contained page: no script, no file beside it, readable in light and dark."""

from __future__ import annotations

import base64
from pathlib import Path

import numpy as np

from .errors import MachineError
from .inspection import COLUMNS, row
from .plots import VALUES, map_png, maps
from .survey import Survey

TEMPLATE = Path(__file__).parent / "data" / "inspect.html.j2"
_HEIGHT = 120


def render(found: Survey) -> str:
    """The page as text; every name from the checkpoint is escaped.

    Raises:
        MachineError: jinja2 or matplotlib is missing.
    """
    try:
        from jinja2 import Environment, StrictUndefined
    except ImportError as error:
        raise MachineError("plots and pages need matplotlib and jinja2: pip install 'compiled-moe[report]'") from error
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    data = found.to_dict()
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        data=data,
        columns=COLUMNS,
        rows=[(row(layer), layer.report.ok) for layer in found.layers],
        bars=_bars(found.histogram[:127]),
        height=_HEIGHT,
        maps=[_map(name, grid) for name, grid in maps(found).items()],
        head=str(found.report).splitlines()[0],
    )


def _bars(counts: np.ndarray) -> list[dict]:
    """Heights on a logarithmic scale, so that one rare code still shows."""
    log = np.log1p(counts.astype(float))
    heights = log / max(float(log.max()), 1.0) * _HEIGHT
    return [
        {"x": 6 * code, "height": round(float(h), 2), "value": f"{VALUES[code]:g}", "count": int(counts[code])}
        for code, h in enumerate(heights)
    ]


def _map(name: str, grid: np.ndarray) -> dict:
    known = grid[np.isfinite(grid)]
    ends = (10 ** float(known.min()), 10 ** float(known.max())) if known.size else (float("nan"),) * 2
    return {
        "name": name, "png": base64.b64encode(map_png(grid)).decode(), "layers": grid.shape[0],
        "experts": grid.shape[1], "low": f"{ends[0]:.2e}", "high": f"{ends[1]:.2e}",
    }  # fmt: skip
