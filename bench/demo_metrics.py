"""Held-out bits per byte of the shipped model in every precision: `python -m bench.demo_metrics [--trained DIR]`.

With --trained, the folder that bench.train_demo wrote, the unquantised model is measured in the same run; without it,
the figure that training recorded is quoted beside.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch

import compiled_moe
from bench.bits_per_byte import bits_per_byte, load_pretrained
from bench.record import RESULTS, write
from nvfp4.format import PRECISIONS

LIMITS = {"w4a16": 0.005, "w4a4_per_token": 0.015}
"""Largest loss against bf16 that is accepted."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trained", type=Path, help="folder of the unquantised model")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=RESULTS / "demo_metrics.json")
    args = parser.parse_args(argv)
    text = (compiled_moe.DEMO / "heldout.txt").read_bytes()
    bits, seconds, reports = {}, {}, {}

    def measure(name: str, model: torch.nn.Module) -> None:
        begin = time.perf_counter()
        bits[name] = bits_per_byte(model, text)
        seconds[name] = time.perf_counter() - begin
        print(f"{name}: {bits[name]:.4f} bits per byte, {seconds[name]:.0f} s", flush=True)

    if args.trained:
        measure("unquantised", load_pretrained(str(args.trained)))
    else:
        bits["unquantised"] = json.loads((compiled_moe.DEMO / "training.json").read_text())["heldout_bits_per_byte"]
    for precision in PRECISIONS:
        repairs = ("fill_activation_max",) if precision == "w4a4_static" else ()  # dead experts carry no input_scale
        model = compiled_moe.load(precision=precision, repairs=repairs, device=args.device)
        reports[precision] = str(model.nvfp4.report)
        measure(precision, model)
    change = {name: value / bits["unquantised"] - 1 for name, value in bits.items()}
    write(
        args.out, "python -m bench.demo_metrics" + (" --trained DIR" if args.trained else ""), text_bytes=len(text),
        bits_per_byte=bits, change=change, seconds=seconds, reports=reports,
        dtype="float32" if args.device == "cpu" else "bfloat16",
    )  # fmt: skip
    late = [name for name, limit in LIMITS.items() if change[name] > limit]
    return 1 if late or bits["unquantised"] > 1.0 else 0


if __name__ == "__main__":
    sys.exit(main())
