"""Decoding the shipped model: ours eager and compiled, beside transformers' bf16 experts: `python -m bench.decode`.

Verified before it is timed: in float32 the compiled tokens equal the eager ones. All variants are timed in turn in one
process, several rounds, since machines are noisy. On a GPU the profiler then counts what the host does in a step.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import time
from collections import Counter
from pathlib import Path

import torch

import compiled_moe
from bench.bits_per_byte import encode
from bench.record import RESULTS, write
from compiled_moe.decode import Decoder
from compiled_moe.unquantised import unquantised

SYNCHRONISING = (
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "cudaMemcpy",
    "cuCtxSynchronize",
)


def tokens(decoder: Decoder, prompt: torch.Tensor, count: int) -> list[int]:
    return [i for chunk in decoder.stream(prompt, count) for i in chunk]


def seconds_a_token(decoder: Decoder, prompt: torch.Tensor, count: int) -> float:
    """Decode steps only, prompt excluded, from the first launch to the last token on the host."""
    decoder.start(prompt)
    decoder.history.cpu()
    begin = time.perf_counter()
    for _ in range(count):
        decoder.step()
    decoder.history.cpu()
    return (time.perf_counter() - begin) / count


def host_calls(decoder: Decoder, prompt: torch.Tensor, steps: int = 16) -> dict[str, float]:
    """CUDA runtime and driver calls per decode step, by name, from the profiler."""
    from torch.profiler import ProfilerActivity, profile

    decoder.start(prompt)
    for _ in range(4):
        decoder.step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            decoder.step()
    # the profiler ends with a cudaDeviceSynchronize of its own
    names = Counter(e.name for e in profiler.events() if re.match(r"cu(da)?[A-Z]", e.name))
    names["cudaDeviceSynchronize"] -= 1
    return {name: count / steps for name, count in sorted(names.items()) if count > 0}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--precision", default="w4a16")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    prompt, length = encode(b"def "), 4 + args.tokens + 64

    def ours(dtype: torch.dtype, compile: bool) -> Decoder:
        model = compiled_moe.load(device=args.device, dtype=dtype, precision=args.precision)
        return Decoder(model, length, compile=compile)

    def theirs(dtype: torch.dtype) -> torch.nn.Module:
        return unquantised(compiled_moe.load(device=args.device, dtype=dtype))

    eager32, compiled32 = ours(torch.float32, False), ours(torch.float32, True)
    compiled32.warmup(prompt)
    want, got = tokens(eager32, prompt, args.tokens), tokens(compiled32, prompt, args.tokens)
    agree = sum(a == b for a, b in zip(want, got, strict=True))
    print(f"float32: {agree} of {args.tokens} compiled tokens equal the eager ones")
    variants = {
        "ours eager float32": eager32,
        "ours compiled float32": compiled32,
        "ours eager bfloat16": ours(torch.bfloat16, False),
        "ours compiled bfloat16": ours(torch.bfloat16, True),
        "transformers eager experts bfloat16": Decoder(theirs(torch.bfloat16), length, compile=False),
        "transformers eager experts float32": Decoder(theirs(torch.float32), length, compile=False),
    }
    times: dict[str, list[float]] = {name: [] for name in variants}
    for decoder in variants.values():
        decoder.warmup(prompt)
    for _ in range(args.rounds):
        for name, decoder in variants.items():
            times[name].append(seconds_a_token(decoder, prompt, args.tokens))
    speed = {name: 1 / statistics.median(t) for name, t in times.items()}
    for name, value in speed.items():
        print(f"{name:36} {value:8.1f} tokens/s")
    results: dict = {"tokens": args.tokens, "equal_tokens_float32": agree, "precision": args.precision}
    results |= {"tokens_per_second": speed, "seconds_per_token": times}
    loaded = compiled32.model.nvfp4
    results["expert_bytes_over_bf16"] = loaded.expert_bytes / (2 * loaded.expert_parameters)
    results["threads"] = torch.get_num_threads()
    if args.device == "cuda":
        calls = host_calls(variants["ours compiled bfloat16"], prompt)
        results["host_calls_per_step"] = calls
        results["synchronising_calls_per_step"] = sum(calls.get(name, 0) for name in SYNCHRONISING)
        results["eager_host_calls_per_step"] = host_calls(variants["ours eager bfloat16"], prompt)
        results["graphs"] = compiled32.graphs()
        print(f"per step: {calls}")
    name = "h200" if args.device == "cuda" else "cpu"
    write(args.out or RESULTS / f"decode_{name}.json", "python -m bench.decode", **results)
    return 0 if agree == args.tokens else 1


if __name__ == "__main__":
    sys.exit(main())
