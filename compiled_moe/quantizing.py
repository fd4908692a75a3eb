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

from nvfp4 import NVFP4Error

from .checkpoint import Checkpoint
from .errors import CheckpointError, CompiledMoeError, MachineError
from .export import ACTIVATION_POLICIES, Calibration, export
from .shards import Reader, read_json
from .survey import survey
from .terminal import progress
from .writing import SHARD_BYTES, ShardWriter, modelopt_config

SCHEMA_VERSION = 1
_BESIDE = ("tokenizer", "special_tokens", "added_tokens", "vocab", "merges", "chat_template", "generation_config")
_COPIED = ("F64", "F32", "F16", "BF16", "I64", "I32", "BOOL")


@dataclass(frozen=True)
class Request:
    """What to quantise; the options of ``compiled-moe quantize``."""

    source: Path
    out: Path
    calibrate: Path | None = None
    tokens: int = 16384
    window: int = 512
    activation: str = "per_expert"
    device: str | None = None
    shard_bytes: int = SHARD_BYTES


def run(request: Request, as_json: bool = False) -> int:
    """Quantise, look at the result, print what happened; returns the exit code.

    Raises:
        CompiledMoeError: what was asked cannot be done.
    """
    begin = time.perf_counter()
    config = read_json(request.source / "config.json", "a checkpoint folder holds config.json and *.safetensors")
    facts = _convert(request, config) if config.get("quantization_config") else _calibrated(request)
    _copy_beside(request.source, request.out)
    found = survey(Checkpoint.open(request.out))
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
        f"{name} {'not looked at' if ok is None else 'yes' if ok else 'no'}" for name, ok in s["usable"].items()
    )
    return [*lines, f"usable as: {usable}"]


def _calibrated(request: Request) -> dict[str, Any]:
    """The way of a model in bfloat16."""
    needs_text = request.activation != "none"
    if request.activation not in ACTIVATION_POLICIES:
        raise CompiledMoeError(f"activation is {request.activation!r}; known are {', '.join(ACTIVATION_POLICIES)}")
    if needs_text and request.calibrate is None:
        raise CompiledMoeError("give text with --calibrate FILE, or --activation none for a weight-only checkpoint")
    model = _model(request)
    ids = _windows(request) if needs_text else []
    with progress("calibrating", counted=False), Calibration(model) as calibration, torch.no_grad():
        for window in ids:
            model(input_ids=window[None].to(model.device), use_cache=False)
    with progress("writing") as bar:
        export(model, calibration, request.out, request.activation, request.shard_bytes, bar)
    tokens = sum(w.numel() for w in ids)
    return {
        "how": f"calibrated on {tokens} tokens" if tokens else "weights only",
        "activation": request.activation, "calibration_tokens": tokens,
        "dead_experts": calibration.dead if tokens else {},
        "tokens_per_expert": {name: count.tolist() for name, count in calibration.tokens.items()} if tokens else {},
    }  # fmt: skip


def _model(request: Request) -> Any:
    try:
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise MachineError("quantising needs transformers: pip install 'compiled-moe[hf]'") from error
    device = request.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise MachineError("no CUDA device is visible to PyTorch here; leave --device out, or give cpu")
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    try:
        model = AutoModelForCausalLM.from_pretrained(
            request.source, dtype=dtype, experts_implementation="eager", use_safetensors=True
        )
    except (ValueError, KeyError, OSError) as error:
        raise CheckpointError(f"transformers cannot load {request.source}: {error}") from error
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


def _convert(request: Request, config: dict) -> dict[str, Any]:
    """The way of MXFP4: codes stay, scales convert exactly, the rest is copied."""
    checkpoint = Checkpoint.open(request.source)
    if checkpoint.quantization.algorithm != "MXFP4":
        raise CheckpointError(f"{request.source} is {checkpoint.quantization.algorithm} already; nothing to quantise")
    if request.calibrate is not None:
        raise CompiledMoeError("MXFP4 is converted without a forward pass; leave --calibrate out")
    consumed = {part.header.key for layer in checkpoint.layers for part in layer.parts}
    rest = [header for key, header in checkpoint.headers.items() if key not in consumed]
    foreign = [header for header in rest if header.dtype not in _COPIED]
    if foreign:
        raise CheckpointError(
            f"{foreign[0].source} is {foreign[0].dtype}; only checkpoints whose other tensors are plain floats are "
            "converted, since ModelOpt's layout has one algorithm beside them"
        )
    writer, reader = ShardWriter(request.out, request.shard_bytes), Reader()
    with progress("converting") as bar:
        for layer in checkpoint.layers:
            for part in layer.parts:
                try:
                    values = part.read(reader)
                except NVFP4Error as error:
                    raise CheckpointError(str(error)) from error
                for tensor, value in values:
                    key = f"{layer.name}.{part.expert}.{part.projection}.{tensor}"
                    scale = tensor == "weight_scale"
                    writer.add(key, value.contiguous().view(torch.float8_e4m3fn) if scale else value)
                    if bar is not None:
                        bar(writer.nbytes, checkpoint.nbytes)
        for header in rest:
            writer.add(header.key, reader.get(header))
    ignored = sorted({header.key.rpartition(".")[0] for header in rest if len(header.shape) == 2})
    writer.close(modelopt_config(config, ignored, weight_only=True))
    return {
        "how": "MXFP4 converted bit for bit", "activation": "none", "calibration_tokens": 0, "dead_experts": {},
        "tokens_per_expert": {},
    }  # fmt: skip


def _copy_beside(source: Path, out: Path) -> None:
    """Tokenizer and generation files."""
    for file in sorted(source.iterdir()):
        if file.is_file() and file.name.startswith(_BESIDE) and file.suffix in (".json", ".txt", ".model", ".jinja"):
            shutil.copyfile(file, out / file.name)
