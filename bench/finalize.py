"""How fast a layer is checked and handed over, and how fast it comes from files: `python -m bench.finalize`.

A DeepSeek-V3-sized layer lies on the device, filled, and is finalized: NVFP4 bytes over the seconds of finalize, checks
included, and the device memory that it holds beside the layer at its peak, which must stay below one expert. Beside it,
a part of the experts goes to a safetensors file and comes back through RawExperts. Exit code 1 where a goal is missed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

import nvfp4
from bench.record import RESULTS, write
from bench.shapes import SHAPES

GOAL = 20e9
"""Bytes per second on an H200, checks included."""
KEYS = ("weight", "weight_scale", "weight_scale_2", "input_scale")


def filled(experts: int, hidden: int, inter: int, device: str) -> nvfp4.RawExperts:
    """Slots with random codes and healthy scales, every write recorded."""
    raw = nvfp4.RawExperts(experts, hidden, inter, device=device)
    for name, tensor in raw.tensors.items():
        if tensor.dtype == torch.uint8:
            low, high = (0x20, 0x40) if name.endswith("block_scale") else (0, 256)
            tensor.random_(low, high)
        else:
            tensor.uniform_(1e-4, 2e-4)
    for e in range(experts):
        for projection in raw.spec.projections:
            for key in KEYS:
                raw.sources[(e, projection, key)] = ["bench"]
    return raw


def seconds(call, device: str) -> float:
    """Wall time of a call that leaves work on the device."""
    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


class Peak:
    """Device memory that was held above what was there before; zero without a GPU."""

    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"
        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()

    def bytes(self) -> int:
        return torch.cuda.max_memory_allocated() - self.before if self.cuda else 0


def from_files(folder: Path, experts: int, hidden: int, inter: int, device: str) -> tuple[float, int, int]:
    """Seconds from one shard to finalized weights, the bytes, and the peak beside the weights."""
    raw = filled(experts, hidden, inter, "cpu")
    path = folder / "layer.safetensors"
    save_file(
        {f"{e}.{p}.{k}": raw.slot(e, p, k).clone() for e in range(experts) for p in raw.spec.projections for k in KEYS},
        path,
    )

    made = []

    def load() -> None:
        again = nvfp4.RawExperts(experts, hidden, inter, device=device)
        with safe_open(path, framework="pt") as file:
            for key in tuple(file.keys()):
                e, projection, tensor = key.split(".")
                again.load(int(e), projection, tensor, file.get_tensor(key), f"{path.name}:{key}")
        made.append(nvfp4.finalize(again, "w4a4_static")[0])

    peak = Peak(device)
    taken = seconds(load, device)
    return taken, path.stat().st_size, peak.bytes() - made[0].nbytes if device == "cuda" else 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="DeepSeek-V3", choices=SHAPES)
    parser.add_argument("--experts", type=int, help="fewer experts than the shape has, for small machines")
    parser.add_argument("--file-experts", type=int, default=32)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=RESULTS / "finalize_h200.json")
    args = parser.parse_args(argv)
    shape = SHAPES[args.shape]
    experts = args.experts or shape.experts
    size = experts * shape.expert_bytes
    rates, peaks = [], []
    for _ in range(4):
        raw = filled(experts, shape.hidden, shape.inter, args.device)
        peak = Peak(args.device)
        rates.append(size / seconds(lambda raw=raw: nvfp4.finalize(raw, "w4a4_static"), args.device))
        peaks.append(peak.bytes())
        del raw
    with tempfile.TemporaryDirectory() as folder:
        file_seconds, file_bytes, file_peak = from_files(
            Path(folder), args.file_experts, shape.hidden, shape.inter, args.device
        )
    best = sorted(rates)[len(rates) // 2]
    print(
        f"finalize {best / 1e9:.1f} GB/s over {size / 1e9:.2f} GB, {max(peaks) / 1e6:.1f} MB above the layer at the "
        f"peak; one expert is {shape.expert_bytes / 1e6:.1f} MB"
    )
    print(
        f"from files {file_bytes / file_seconds / 1e9:.2f} GB/s, {file_peak / 1e6:.1f} MB above the weights at the peak"
    )
    write(
        args.out, "python -m bench.finalize", shape=args.shape, experts=experts, layer_bytes=size, bytes_per_s=rates,
        peak_extra_bytes=peaks, expert_bytes=shape.expert_bytes, file_bytes=file_bytes, file_seconds=file_seconds,
        file_peak_extra_bytes=file_peak,
    )  # fmt: skip
    missed = max(*peaks, file_peak) > shape.expert_bytes or (args.device == "cuda" and best < GOAL)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
