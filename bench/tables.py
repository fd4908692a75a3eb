"""Write the README's tables from the result files: `python -m bench.tables`. With --check, only say what is stale."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from bench.record import RESULTS

README = Path(__file__).parents[1] / "README.md"


def decode(name: str) -> list[str]:
    """Tokens a second of every variant, and what one machine makes of the best over its own eager path."""
    result = json.loads((RESULTS / name).read_text())
    speed = result["tokens_per_second"]
    where = result["machine"]["gpu"] or f"{result['machine']['cpu']}, {result['threads']} threads"
    base = speed["transformers eager experts bfloat16"]
    versions = f"torch {result['machine']['torch']}"
    return [
        f"| shipped model, {where}, {versions} (`{name}`) | tokens/s | against transformers |",
        "|---|---|---|",
        *(f"| {variant} | {value:,.0f} | {value / base:.1f}x |" for variant, value in speed.items()),
    ]


def metrics(name: str) -> list[str]:
    """Bits per byte in every precision."""
    result = json.loads((RESULTS / name).read_text())
    where = result["machine"]["gpu"] or "CPU"
    head = f"| held-out text, {result['text_bytes']:,} bytes, {where} (`{name}`) | bits per byte | change |"
    rows = [f"| {p} | {b:.4f} | {result['change'][p]:+.2%} |" for p, b in result["bits_per_byte"].items()]
    return [head, "|---|---|---|", *rows]


def best(times: dict, word: str) -> float | None:
    """The least time of the implementations with a word in their names."""
    return min((entry["us"] for name, entry in times.items() if word in name), default=None)


def number(value: float | None, form: str = ",.0f") -> str:
    return "" if value is None else format(value, form)


def layers(name: str) -> list[str]:
    """Every point beside its peers, and what it is held against."""
    result = json.loads((RESULTS / name).read_text())
    first = result["precisions"][0]
    head = (
        f"| {result['machine']['gpu']} (`{name}`) | tokens | floor | {first} | w4a4 / {first} | Humming "
        "| grouped_mm bf16 | transformers bf16 | of the floor | goal | over the best peer | met |"
    )
    rows = [head, "|" + "---|" * 12]
    for layer in result["layers"]:
        for p in sorted(layer["points"], key=lambda p: (p["routing"] != "uniform", p["routing"], p["tokens"])):
            times, j = p["times"], p.get("judgement")
            us, w4a4 = times[first]["us"], best(times, "w4a4_per_token")
            peers = min((e["us"] for n, e in times.items() if n not in result["precisions"]), default=None)
            extra = f" (+{j['of_goal_floor'] * us - p['floor_us']:.0f} us)" if j and j["regime"] == "few tokens" else ""
            cells = [
                layer["shape"],
                f"{p['tokens']}" + ("" if p["routing"] == "uniform" else f" {p['routing']}"),
                number(p["floor_us"]), number(us), number(w4a4 and w4a4 / us, ".2f"), number(best(times, "humming")),
                number(best(times, "torch grouped_mm")), number(best(times, "transformers")),
                number(j["of_goal_floor"] if j else p["floor_us"] / us, ".2f"),
                f"{j['goal']:.2f}{extra}" if j else "",
                number(peers and peers / us, ".2f") + (f" of {j['over_peer_goal']}" if j and peers else ""),
                ("yes" if j["met"] else "no") if j else "",
            ]  # fmt: skip
            rows.append(f"| {' | '.join(cells)} |")
    return without_empty_columns(rows)


def without_empty_columns(rows: list[str]) -> list[str]:
    """A table without the columns that hold nothing, such as peers that did not run."""
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    kept = [i for i in range(len(cells[0])) if any(row[i] for row in cells[2:])]
    head, _, *body = ([row[i] for i in kept] for row in cells)
    return [f"| {' | '.join(head)} |", "|" + "---|" * len(kept), *(f"| {' | '.join(row)} |" for row in body)]


def launches(name: str) -> list[str]:
    """Graph nodes, host time of an eager call, and bit identity of every layer."""
    result = json.loads((RESULTS / name).read_text())
    head = "| layer | precision | graph nodes | host, us of an eager call | replays that differ | packing, GB/s |"
    rows = [head, "|---|---|---|---|---|---|"]
    for layer in result["layers"]:
        for precision in result["precisions"]:
            entries = [p["times"][precision] for p in layer["points"]]
            nodes = sorted({e["nodes"] for e in entries})
            host = [e["host_us"] for e in entries if "host_us" in e]
            same = layer.get("identity", {}).get(precision)
            cells = [
                layer["shape"], precision, "-".join(map(str, dict.fromkeys((nodes[0], nodes[-1])))) if nodes else "",
                f"{min(host):.0f}-{max(host):.0f}" if host else "",
                f"{same['differing_from_eager']} of {same['replays']:,}" if same else "",
                number(layer["weight_bytes"] / layer["finalize_s"] / 1e9),
            ]  # fmt: skip
            rows.append(f"| {' | '.join(cells)} |")
    return rows


TABLES = {
    "moe_sm90_h200": lambda: layers("moe_sm90_h200.json"),
    "moe_sm90_launches": lambda: launches("moe_sm90_h200.json"),
    "moe_humming_h200": lambda: layers("moe_humming_h200.json"),
    "decode_h200": lambda: decode("decode_h200.json"),
    "decode_cpu": lambda: decode("decode_cpu.json"),
    "demo_metrics": lambda: metrics("demo_metrics.json"),
}


def render(text: str) -> str:
    """The text with every `<!-- table NAME -->` ... `<!-- end -->` made anew."""
    for name, table in TABLES.items():
        block = re.compile(rf"(<!-- table {name} -->\n).*?(<!-- end -->)", re.S)
        if not block.search(text):
            continue
        body = "\n".join(table()).replace("\\", "\\\\")
        text = block.sub(rf"\1{body}\n\2", text)
    return text


def main() -> int:
    text = README.read_text()
    fresh = render(text)
    if "--check" in sys.argv[1:]:
        return int(text != fresh)
    README.write_text(fresh)
    return 0


if __name__ == "__main__":
    sys.exit(main())
