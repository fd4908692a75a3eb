"""How fast a layer is checked and handed over, and how fast it comes from files: `python -m bench.finalize`.

A DeepSeek-V3-sized layer lies on the device, filled, and is finalized: NVFP4 bytes over the seconds of finalize, checks
included. Beside it, a part of the experts goes to a safetensors file and comes back through RawExperts.
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


def from_files(folder: Path, experts: int, hidden: int, inter: int, device: str) -> tuple[float, int]:
    """Seconds from one shard to finalized weights, and the bytes."""
    raw = filled(experts, hidden, inter, "cpu")
    path = folder / "layer.safetensors"
    save_file(
        {f"{e}.{p}.{k}": raw.slot(e, p, k).clone() for e in range(experts) for p in raw.spec.projections for k in KEYS},
        path,
    )

    def load() -> None:
        again = nvfp4.RawExperts(experts, hidden, inter, device=device)
        with safe_open(path, framework="pt") as file:
            for key in tuple(file.keys()):
                e, projection, tensor = key.split(".")
                again.load(int(e), projection, tensor, file.get_tensor(key), f"{path.name}:{key}")
        nvfp4.finalize(again, "w4a4_static")

    return seconds(load, device), path.stat().st_size


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
    cuda = args.device == "cuda"
    rates, peaks = [], []
    for _ in range(4):
        raw = filled(experts, shape.hidden, shape.inter, args.device)
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        rates.append(size / seconds(lambda raw=raw: nvfp4.finalize(raw, "w4a4_static"), args.device))
        peaks.append(torch.cuda.max_memory_allocated() - before if cuda else 0)
        del raw
    with tempfile.TemporaryDirectory() as folder:
        file_seconds, file_bytes = from_files(Path(folder), args.file_experts, shape.hidden, shape.inter, args.device)
    best = sorted(rates)[len(rates) // 2]
    print(
        f"finalize {best / 1e9:.1f} GB/s over {size / 1e9:.2f} GB, {peaks[-1] / 1e6:.0f} MB above the layer at the peak"
    )
    print(f"one expert is {shape.expert_bytes / 1e6:.1f} MB; from files {file_bytes / file_seconds / 1e9:.2f} GB/s")
    write(
        args.out, "python -m bench.finalize", shape=args.shape, experts=experts, layer_bytes=size, bytes_per_s=rates,
        peak_extra_bytes=peaks, expert_bytes=shape.expert_bytes, file_bytes=file_bytes, file_seconds=file_seconds,
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
