"""Quantise the trained demo model into the package data: `python -m bench.build_demo --trained DIR --stdlib DIR`."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, ByT5Tokenizer

from bench.stdlib_text import random_windows, read_sources
from compiled_moe import DEMO
from compiled_moe.calibration import Calibration
from compiled_moe.export import Plan
from compiled_moe.writing import ShardWriter


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trained", type=Path, required=True, help="what bench.train_demo wrote")
    parser.add_argument("--stdlib", type=Path, help="the standard library it was trained on, if not this Python's")
    parser.add_argument("--windows", type=int, default=64, help="calibration windows of 512 bytes of training text")
    parser.add_argument("--out", type=Path, default=DEMO)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    model = AutoModelForCausalLM.from_pretrained(args.trained, dtype=torch.float32, experts_implementation="eager")
    batches = random_windows(read_sources(args.stdlib), 8, 512, seed=1)
    with Calibration(model.eval()) as calibration, torch.no_grad():
        for _ in range(args.windows // 8):
            model(input_ids=next(batches)[:, :-1], use_cache=False)
    for old in args.out.glob("*.safetensors"):
        old.unlink()
    Plan.read(args.trained).write(ShardWriter(args.out), calibration.amax)
    ByT5Tokenizer().save_pretrained(args.out)
    for name in ("heldout.txt", "files.json"):
        shutil.copy(args.trained / name, args.out / name)
    trained = json.loads((args.trained / "train.json").read_text())
    trained["calibration"] = {
        "bytes": args.windows * 512,
        "tokens_per_expert": {name: counts.tolist() for name, counts in calibration.tokens.items()},
    }
    (args.out / "training.json").write_text(json.dumps(trained, indent=1) + "\n")
    size = sum(f.stat().st_size for f in args.out.iterdir())
    dead = sum(int((counts == 0).sum()) for counts in calibration.tokens.values())
    print(f"{args.out}: {size / 1e6:.1f} MB, {dead} experts saw no calibration byte and carry no input_scale")
    return 0


if __name__ == "__main__":
    sys.exit(main())
