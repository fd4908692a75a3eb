"""``compiled-moe quantize``: a model in bfloat16 to NVFP4, calibrated on given text; or MXFP4 without loss."""

from __future__ import annotations

import json
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .calibration import ACTIVATION_POLICIES, Calibration
from .checkpoint import Checkpoint
from .converting import convert
from .device import chosen
from .errors import CheckpointError, CompiledMoeError, MachineError
from .export import Plan
from .places import Places
from .shards import read_json
from .survey import survey
from .terminal import progress
from .writing import SHARD_BYTES, ShardWriter

SCHEMA_VERSION = 1
_BESIDE = ("tokenizer", "special_tokens", "added_tokens", "vocab", "merges", "chat_template", "generation_config")


@dataclass(frozen=True)
class Request:
    """What to quantise; the options of ``compiled-moe quantize``."""

    source: Path
    out: Path
    calibrate: Path | None = None
    tokens: int = 16384
    window: int = 512
    activation: str | None = None
    device: str | None = None
    shard_bytes: int = SHARD_BYTES


def run(request: Request, as_json: bool = False) -> int:
    """Quantise, look at the result, print what happened; returns the exit code.

    Raises:
        CompiledMoeError: what was asked cannot be done.
    """
    begin = time.perf_counter()
    config = read_json(request.source / "config.json", "a checkpoint folder holds config.json and *.safetensors")
    facts = _converted(request, config) if config.get("quantization_config") else _calibrated(request)
    _copy_beside(request.source, request.out)
    with progress("checking") as bar:
        found = survey(Checkpoint.open(request.out), progress=bar)
    summary = {
        "schema": SCHEMA_VERSION, "source": str(request.source), "out": str(request.out), **facts,
        "bytes": found.checkpoint.nbytes, "seconds": time.perf_counter() - begin, "usable": found.usable,
        "counts": found.report.to_dict()["counts"],
    }  # fmt: skip
    if as_json:
        print(json.dumps(summary, indent=2))
    for line in _lines(summary):
        print(line, file=sys.stderr if as_json else sys.stdout)
    return 0 if found.usable["w4a16"] else 1


def _lines(s: dict) -> list[str]:
    lines = [
        f"{s['out']}: {s['bytes'] / 1e6:.1f} MB in {s['seconds']:.0f} s, {s['how']}",
        f"activation scales: {s['activation']}, {ACTIVATION_POLICIES[s['activation']]}",
    ]
    for layer, ids in s["dead_experts"].items():
        fate = "take the layer's maximum" if s["activation"] == "layer_max" else "carry no input_scale"
        shown = ", ".join(map(str, ids[:16])) + (f" and {len(ids) - 16} more" if len(ids) > 16 else "")
        lines.append(f"  {layer}: {len(ids)} experts saw no calibration token and {fate}: {shown}")
    usable = ", ".join(
        f"{name} {'needs activation scales' if ok is None else 'yes' if ok else 'no'}"
        for name, ok in s["usable"].items()
    )
    return [*lines, f"usable as: {usable}"]


def _calibrated(request: Request) -> dict[str, Any]:
    """The way of a model in bfloat16: calibration needs all of it in memory, writing one shard and one expert."""
    policy = request.activation or "per_expert"
    if policy not in ACTIVATION_POLICIES:
        raise CompiledMoeError(f"activation is {policy!r}; known are {', '.join(ACTIVATION_POLICIES)}")
    if policy != "none" and request.calibrate is None:
        raise CompiledMoeError("give text with --calibrate FILE, or --activation none for a weight-only checkpoint")
    if policy == "none" and request.calibrate is not None:
        raise CompiledMoeError("--activation none measures nothing; leave --calibrate out, or choose another policy")
    device = _device(request)
    plan, writer = Plan.read(request.source), ShardWriter(request.out, request.shard_bytes)
    if policy == "none":
        with progress("writing") as bar:
            plan.write(writer, None, device, bar)
        return _facts("weights only", policy)
    windows = _windows(request)
    calibration, modules = _watched(plan, windows, device)
    with progress("writing") as bar:
        plan.write(writer, lambda layer, p: calibration.amax(modules[layer], p, policy), device, bar)
    tokens = sum(w.numel() for w in windows)
    return _facts(f"calibrated on {tokens} tokens", policy, tokens, calibration)


def _facts(how: str, policy: str, tokens: int = 0, calibration: Calibration | None = None) -> dict[str, Any]:
    """What the summary says of the way that was taken."""
    return {
        "how": how, "activation": policy, "calibration_tokens": tokens,
        "dead_experts": calibration.dead if calibration else {},
        "tokens_per_expert": {n: count.tolist() for n, count in calibration.tokens.items()} if calibration else {},
    }  # fmt: skip


def _watched(plan: Plan, windows: list[torch.Tensor], device: str) -> tuple[Calibration, dict[str, str]]:
    """Run the text through the model; returns what was seen, and the module of each layer of the files."""
    model = _model(plan.path, device)
    places = Places(model)
    modules = {layer: places.module(layer) for layer in plan.layers}
    with progress("calibrating", counted=False) as bar, Calibration(model) as calibration, torch.no_grad():
        unwatched = [layer for layer, name in modules.items() if name not in calibration.experts]
        if unwatched:
            raise CheckpointError(f"{unwatched[0]} is no experts module that can be calibrated; give --activation none")
        for done, window in enumerate(windows):
            model(input_ids=window[None].to(model.device), use_cache=False)
            if bar is not None:
                bar(done + 1, len(windows))
    return calibration, modules


def _device(request: Request) -> str:
    device = chosen(request.device)
    if device.type not in ("cuda", "cpu"):
        raise CompiledMoeError(f"device is {request.device!r}; give cuda or cpu")
    return str(device)


def _model(path: Path, device: str) -> Any:
    try:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging
    except ImportError as error:
        raise MachineError("calibrating needs transformers: pip install 'compiled-moe[hf]'") from error
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, experts_implementation="eager", use_safetensors=True
        )
    except (ValueError, KeyError, OSError) as error:
        raise CheckpointError(f"transformers cannot load {path}: {error}") from error
    return model.eval().to(device)


def _windows(request: Request) -> list[torch.Tensor]:
    """The text as windows of ids, up to the number of tokens asked for."""
    from transformers import AutoTokenizer

    assert request.calibrate is not None
    try:
        text = request.calibrate.read_text(encoding="utf-8", errors="replace")
        tokenizer = AutoTokenizer.from_pretrained(request.source)
    except (OSError, ValueError, KeyError) as error:
        raise CompiledMoeError(f"the calibration text or the tokenizer cannot be read: {error}") from error
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids[0][: request.tokens]
    if not ids.numel():
        raise CompiledMoeError(f"{request.calibrate} is empty; calibration needs text")
    return list(ids.split(request.window))


def _converted(request: Request, config: dict) -> dict[str, Any]:
    """The way of MXFP4."""
    if request.calibrate is not None or request.activation not in (None, "none"):
        raise CompiledMoeError(
            "a quantised source is converted bit for bit into a weight-only checkpoint, without a forward pass; leave "
            "--calibrate and --activation out, and serve it as w4a16 or w4a4_per_token"
        )
    checkpoint = Checkpoint.open(request.source)
    with progress("converting") as bar:
        convert(checkpoint, lambda: ShardWriter(request.out, request.shard_bytes), bar)
    return _facts("MXFP4 converted bit for bit", "none")


def _copy_beside(source: Path, out: Path) -> None:
    """Tokenizer and generation files."""
    for file in sorted(source.iterdir()):
        if file.is_file() and file.name.startswith(_BESIDE) and file.suffix in (".json", ".txt", ".model", ".jinja"):
            shutil.copyfile(file, out / file.name)
