"""The CPU kernel in C++: built on first use where a compiler is present, otherwise the torch reference serves.

One file, no torch headers, called through ctypes: it builds in about two seconds and ctypes lets other threads run.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .. import cache
from ..format import ACTIVATIONS, PRECISIONS
from ..reference import local_ids

SOURCE = Path(__file__).with_name("moe.cpp")
FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-fno-math-errno", "-ffp-contract=fast")
_SLOWER = "the pure torch kernel runs, several times slower"
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


@dataclass(frozen=True)
class Build:
    """What came of building the kernel: the loaded library, or why there is none."""

    library: ctypes.CDLL | None
    why: str


class _Arguments(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "router", "w13_global", "w2_global", "a13", "a2", "w13_bias",
                                               "w2_bias", "local", "w13", "w13_scale", "w2", "w2_scale", "out")),
        *((name, ctypes.c_int64) for name in ("tokens", "top_k", "experts", "hidden", "inter", "a13_count",
                                              "a2_count")),
        *((name, ctypes.c_int32) for name in ("kind", "precision", "dtype", "threads")),
        *((name, ctypes.c_float) for name in ("alpha", "beta", "limit")),
    ]  # fmt: skip


@functools.cache
def build() -> Build:
    """Compile (or find compiled) and load the kernel; never raises for want of a compiler."""
    compiler = next((c for c in ("g++", "clang++", "c++") if shutil.which(c)), None)
    if compiler is None:
        return Build(None, f"no C++ compiler (g++ or clang++) on the path: {_SLOWER}")
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    tag = "\n".join((version, _cpu_identity(), *FLAGS)).encode() + SOURCE.read_bytes()
    name = f"nvfp4_moe_{hashlib.sha256(tag).hexdigest()[:16]}.so"
    for folder in cache.folders():
        path = folder / name
        if path.exists():
            return Build(_load(path), f"{compiler}, cached in {folder}")
        try:
            with tempfile.NamedTemporaryFile(dir=folder, suffix=".so", delete=False) as scratch:
                pass
        except OSError:
            continue
        for openmp in (("-fopenmp",), ()):
            command = [compiler, *FLAGS, *openmp, str(SOURCE), "-o", scratch.name]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                os.replace(scratch.name, path)
                return Build(_load(path), f"{compiler}, built into {folder}")
        os.unlink(scratch.name)
        return Build(None, f"{compiler} could not compile the CPU kernel: {_SLOWER}: {done.stderr[-400:]}")
    return Build(None, f"no folder to build the CPU kernel in is writable, and by its owner alone: {_SLOWER}")


def library() -> ctypes.CDLL | None:
    """The loaded kernel, or None where it cannot be built; ``build().why`` says the reason."""
    return build().library


def _load(path: Path) -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(path))
    loaded.nvfp4_moe.argtypes = [ctypes.POINTER(_Arguments)]
    loaded.nvfp4_moe.restype = None
    return loaded


def _cpu_identity() -> str:
    """-march=native makes a file good for one kind of processor only; a shared home may serve several."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))


def _float(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.to(torch.float32).contiguous()


def moe(
    kernel, out, x, topk_ids, topk_weights,
    w13, w13_block_scale, w13_global_scale, w2, w2_block_scale, w2_global_scale,
    a13_scale=None, a2_scale=None, w13_bias=None, w2_bias=None, expert_map=None, *,
    activation="silu", precision="w4a16", layout="checkpoint", alpha=1.0, beta=0.0, limit=None,
):  # fmt: skip
    """See operators.moe; ``out`` [tokens, H] in x's dtype is filled and returned."""
    experts, hidden, half = w2.shape
    result = out if out.dtype == torch.float32 else torch.empty(out.shape, dtype=torch.float32)
    tensors = {
        "x": _float(x), "router": _float(topk_weights), "w13_global": w13_global_scale.contiguous(),
        "w2_global": w2_global_scale.contiguous(), "a13": _float(a13_scale), "a2": _float(a2_scale),
        "w13_bias": _float(w13_bias), "w2_bias": _float(w2_bias),
        "local": local_ids(topk_ids, expert_map, experts).contiguous(),
        "w13": w13, "w13_scale": w13_block_scale, "w2": w2, "w2_scale": w2_block_scale, "out": result,
    }  # fmt: skip
    arguments = _Arguments(
        **{name: None if t is None else t.data_ptr() for name, t in tensors.items()},
        tokens=x.shape[0], top_k=topk_ids.shape[1], experts=experts, hidden=hidden, inter=half * 2,
        a13_count=0 if a13_scale is None else a13_scale.numel(), a2_count=0 if a2_scale is None else a2_scale.numel(),
        kind=ACTIVATIONS[activation], precision=PRECISIONS.index(precision), dtype=_DTYPES[x.dtype],
        threads=torch.get_num_threads(), alpha=alpha, beta=beta, limit=float("inf") if limit is None else limit,
    )  # fmt: skip
    kernel.nvfp4_moe(ctypes.byref(arguments))
    return out if result is out else out.copy_(result)
