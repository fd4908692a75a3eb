"""Pictures of a survey: which block scales are used, and the map of global scales over layers and experts."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nvfp4.format import E2M1

from .errors import MachineError
from .survey import Survey

NAMES = {3: ("gate_proj", "up_proj", "down_proj"), 2: ("up_proj", "down_proj")}
VALUES = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
"""The 127 block scales, in order."""


def _matplotlib() -> Any:
    try:
        import matplotlib.figure
        import matplotlib.image
    except ImportError as error:
        raise MachineError("plots and pages need matplotlib and jinja2: pip install 'compiled-moe[report]'") from error
    return matplotlib


def maps(found: Survey) -> dict[str, np.ndarray]:
    """Projection to log10 of its weight global scale, [layers, experts], NaN where there is none."""
    out: dict[str, np.ndarray] = {}
    experts = max((layer.weight_scale.shape[1] for layer in found.layers), default=0)
    for i, layer in enumerate(found.layers):
        for name, scale in zip(NAMES[len(layer.weight_scale)], layer.weight_scale, strict=True):
            grid = out.setdefault(name, np.full((len(found.layers), experts), np.nan))
            with np.errstate(all="ignore"):
                log = np.log10(scale)
            grid[i, : len(scale)] = np.where(np.isfinite(log), log, np.nan)
    return out


def draw(found: Survey, path: Path) -> None:
    """Write the figure; the format follows the name.

    Raises:
        MachineError: matplotlib is missing. OSError: the path cannot be written.
    """
    matplotlib = _matplotlib()
    grids = maps(found)
    top = 1 if found.codes is None else 2
    figure = matplotlib.figure.Figure(figsize=(12, 8), layout="constrained")
    upper, lower = figure.subfigures(2, 1)
    axes = upper.subplots(1, top, squeeze=False)[0]
    axes[0].bar(np.arange(127), found.histogram[:127], width=1.0)
    axes[0].set_yscale("symlog")
    axes[0].set_xticks(range(0, 127, 8), [f"{VALUES[i]:.3g}" for i in range(0, 127, 8)], rotation=45)
    axes[0].set(title="block scales", xlabel="e4m3 value, one bar a code", ylabel="blocks")
    if found.codes is not None:
        axes[1].bar(range(16), found.codes)
        axes[1].set_xticks(range(16), [f"{v:g}" for v in E2M1] + [f"-{v:g}" for v in E2M1])
        axes[1].set(title="codes", xlabel="e2m1 value", ylabel="weights")
    for axis, (name, grid) in zip(lower.subplots(1, max(len(grids), 1), squeeze=False)[0], grids.items(), strict=False):
        image = axis.imshow(grid, aspect="auto", interpolation="nearest")
        for side in (axis.xaxis, axis.yaxis):
            side.get_major_locator().set_params(integer=True)
        axis.set(title=f"{name} weight_scale_2", xlabel="expert", ylabel="layer")
        lower.colorbar(image, ax=axis, label="log10")
    figure.suptitle(str(found.checkpoint.path))
    figure.savefig(path, dpi=120)


def map_png(grid: np.ndarray) -> bytes:
    """One pixel an expert, transparent where there is no scale."""
    matplotlib = _matplotlib()
    out = io.BytesIO()
    low, high = (np.nanmin(grid), np.nanmax(grid)) if np.isfinite(grid).any() else (0.0, 1.0)
    masked = np.ma.masked_invalid(grid)
    matplotlib.image.imsave(out, masked, vmin=low, vmax=max(high, low + 1e-6), cmap="viridis", format="png")
    return out.getvalue()
