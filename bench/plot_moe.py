"""Plot a result of bench.moe, from its JSON alone: `python -m bench.plot_moe [FILE.json] [--out FILE.svg]`.

Above: time against tokens, one panel a layer. Below: share of the floor. No background and grey text, so that it reads
on light and on dark pages.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from bench.record import RESULTS

LINES = {
    "w4a16": ("w4a16", "#e8590c", "-", "o"),
    "w4a4_per_token": ("w4a4_per_token", "#f2a65a", "--", "o"),
    "humming": ("Humming NVFP4", "#2f8fd0", "-", "s"),
    "torch grouped_mm": ("torch grouped_mm bf16", "#3a9d5d", "-", "^"),
    "transformers": ("transformers bf16", "#9b6bd3", "-", "v"),
    "vllm": ("vLLM fused_moe bf16", "#c2a21d", "-", "d"),
}
"""By a word of the implementation's name, the best of those that share it: label, colour, line, mark."""
GREY = "#808080"


def series(layer: dict) -> dict[str, list[tuple[int, float, float]]]:
    """(tokens, us, floor us) by label, uniform routing, by growing tokens."""
    found: dict[str, list[tuple[int, float, float]]] = {}
    for point in sorted(layer["points"], key=lambda p: p["tokens"]):
        if point["routing"] != "uniform":
            continue
        floor = point["floor_us"]
        found.setdefault("floor", []).append((point["tokens"], floor, floor))
        for word, (label, *_) in LINES.items():
            times = [entry["us"] for name, entry in point["times"].items() if word in name]
            if times:
                found.setdefault(label, []).append((point["tokens"], min(times), floor))
    return found


def draw(result: dict, out: Path) -> None:
    """Write the figure; the format follows the name."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    style: Any = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), GREY)
    style |= {"font.size": 9, "svg.hashsalt": "moe", "svg.fonttype": "path", "axes.titlecolor": GREY}
    layers = [layer for layer in result["layers"] if series(layer)]
    looks = {label: look for label, *look in LINES.values()} | {"floor": [GREY, ":", ""]}
    with pyplot.rc_context(style):
        columns = min(3, len(layers))
        bands = -(-len(layers) // columns)
        figure, axes = pyplot.subplots(
            2 * bands, columns, figsize=(3.3 * columns, 5.2 * bands), squeeze=False, layout="constrained"
        )
        for axis in axes.flat:
            axis.set_visible(False)
        for number, layer in enumerate(layers):
            row, column = divmod(number, columns)
            above, below = axes[2 * row : 2 * row + 2, column]
            for label, points in series(layer).items():
                colour, line, mark = looks[label]
                look = {"color": colour, "linestyle": line, "marker": mark, "markersize": 3.5, "linewidth": 1.4}
                tokens = [p[0] for p in points]
                above.loglog(tokens, [p[1] for p in points], label=label, **look)
                below.semilogx(tokens, [p[2] / p[1] for p in points], **look)
            above.set_title(layer["shape"])
            below.set_ylim(0, 1.05)
            below.set_xlabel("tokens")
            below.set_xticks(tokens, [str(t) for t in tokens], rotation=45)
            below.minorticks_off()
            above.set_xticks(tokens, [])
            above.minorticks_off()
            for axis in (above, below):
                axis.set_visible(True)
                axis.patch.set_alpha(0)
                axis.grid(True, which="major", color=GREY, alpha=0.25, linewidth=0.6)
        for row in range(bands):
            axes[2 * row, 0].set_ylabel("us, one layer after routing")
            axes[2 * row + 1, 0].set_ylabel("share of the floor")
        shown = {label: h for a in axes.flat for h, label in zip(*a.get_legend_handles_labels(), strict=True)}
        figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=3, frameon=False)
        machine = result["machine"]
        figure.suptitle(f"{machine['gpu']}, torch {machine['torch']}, {result['date']}, {result['commit']}", fontsize=9)
        figure.savefig(out, transparent=True, metadata={"Date": None} if out.suffix == ".svg" else None)
        pyplot.close(figure)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", type=Path, nargs="?", default=RESULTS / "moe_sm90_h200.json")
    parser.add_argument("--out", type=Path, help="SVG or PNG; beside the result by default")
    args = parser.parse_args(argv)
    out = args.out or args.result.with_suffix(".svg")
    draw(json.loads(args.result.read_text()), out)
    print(f"wrote {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
