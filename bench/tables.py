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


def moe(name: str) -> list[str]:
    """Times of every point, and the share of the floor that ours reaches."""
    result = json.loads((RESULTS / name).read_text())
    rows = [
        f"| {p['shape']} | {p['tokens']} | {p['floor_us']:,.0f} | {p['w4a16_us']:,.0f} | {p['w4a4_per_token_us']:,.0f} "
        f"| {p['bf16_us']:,.0f} | {p['floor_us'] / p['w4a16_us']:.2f} |"
        for p in result["points"]
    ]
    where = f"{result['machine']['gpu']} (`{name}`)"
    head = f"| {where} | tokens | floor | w4a16 | w4a4_per_token | bf16 grouped_mm | w4a16 of floor |"
    return [head, "|---|---|---|---|---|---|---|", *rows]


TABLES = {
    "moe_h200": lambda: moe("moe_h200.json"),
    "decode_h200": lambda: decode("decode_h200.json"),
    "decode_cpu": lambda: decode("decode_cpu.json"),
    "demo_metrics": lambda: metrics("demo_metrics.json"),
}


def render(text: str) -> str:
    """The text with every `<!-- table NAME -->` ... `<!-- end -->` made anew."""
    for name, table in TABLES.items():
        block = re.compile(rf"(<!-- table {name} -->\n).*?(<!-- end -->)", re.S)
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
