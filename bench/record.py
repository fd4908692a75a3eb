"""What every result file says about where it comes from."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"


def machine() -> dict:
    """GPU or processor, and the versions that matter."""
    versions: dict[str, str | None] = {}
    for name in ("torch", "triton", "transformers", "numpy", "cuda-bindings"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "driver": _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "cpu": next((v.split(": ", 1)[1] for v in _cpuinfo() if v.startswith("model name")), platform.processor()),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        **versions,
    }


def write(path: Path, command: str, **results) -> None:
    """Write a result with its date, commit and machine."""
    body = {
        "command": command,
        "date": datetime.date.today().isoformat(),
        "commit": os.environ.get("COMMIT") or _first_line("git", "rev-parse", "--short", "HEAD"),
        "machine": machine(),
        **results,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(body, indent=1) + "\n")
    print(f"wrote {path}")


def _first_line(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else None


def _cpuinfo() -> list[str]:
    try:
        return [line.replace("\t", "") for line in Path("/proc/cpuinfo").read_text().splitlines()]
    except OSError:
        return []
