"""The main job: load, check, finalize, compile, capture, write text; then one summary."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

from nvfp4 import explain
from nvfp4 import health as nvfp4_health

from .decode import Decoder
from .errors import CheckpointError, CompiledMoeError
from .experts import enable_health, experts_of
from .loader import DEMO, load
from .terminal import progress

_DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class Request:
    """What to generate; the options of ``compiled-moe generate``."""

    model: str | None = None
    prompt: str = "def "
    max_new_tokens: int = 256
    precision: str = "w4a16"
    temperature: float = 0.0
    seed: int = 0
    device: str | None = None
    dtype: str | None = None
    policy: str = "raise"
    repairs: tuple[str, ...] = ()
    compile: bool = True
    health: bool = False


def run(request: Request, as_json: bool = False) -> dict:
    """Generate, print, and return the summary.

    Raises:
        CompiledMoeError, nvfp4.ScaleError.
    """
    if request.dtype is not None and request.dtype not in _DTYPES:
        raise CompiledMoeError(f"dtype is {request.dtype!r}; known are {', '.join(_DTYPES)}")
    text_to = sys.stderr if as_json else sys.stdout
    begin = time.perf_counter()
    with progress("loading") as bar:
        model = load(
            request.model or DEMO, precision=request.precision, device=request.device, policy=request.policy,
            repairs=request.repairs, dtype=getattr(torch, request.dtype) if request.dtype else None, progress=bar,
        )  # fmt: skip
    load_seconds = time.perf_counter() - begin
    health = enable_health(model) if request.health else None
    tokenizer = _tokenizer(model.nvfp4.checkpoint.path)
    prompt = tokenizer(request.prompt, return_tensors="pt", add_special_tokens=False).input_ids[0]
    if not prompt.numel():
        raise CompiledMoeError("the prompt is empty; give at least one character with --prompt")
    decoder = Decoder(
        model, prompt.numel() + request.max_new_tokens, compile=request.compile, temperature=request.temperature,
        seed=request.seed,
    )  # fmt: skip
    with progress("compiling" if not decoder.why_eager else "warming up", counted=False):
        warm_seconds = decoder.warmup(prompt)
    if health is not None:
        health.zero_()
    stop = frozenset(t for t in (tokenizer.eos_token_id,) if t is not None)
    print(request.prompt, end="", flush=True, file=text_to)
    begin, ids, shown = time.perf_counter(), [], ""
    for more in decoder.stream(prompt, request.max_new_tokens, stop):
        ids += more
        text = tokenizer.decode(ids, skip_special_tokens=True)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # a character may end in the next token
            print(text[len(shown) :], end="", flush=True, file=text_to)
            shown = text
    seconds = time.perf_counter() - begin
    print(tokenizer.decode(ids, skip_special_tokens=True)[len(shown) :], flush=True, file=text_to)
    timing = {
        "load_seconds": load_seconds, "compile_seconds": warm_seconds, "generate_seconds": seconds,
        "tokens_per_second": len(ids) / seconds,
    }  # fmt: skip
    summary = _summary(request, model, decoder, tokenizer.decode(ids, skip_special_tokens=True), len(ids), timing)
    if health is not None:
        summary["health"] = [nvfp4_health.read(row) for row in health]
    if as_json:
        print(json.dumps(summary, indent=2))
    else:
        print(_table(summary), file=sys.stderr)
    return summary


def _tokenizer(path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path)
    except (ValueError, OSError, KeyError) as error:
        raise CheckpointError(f"{path} has no tokenizer that transformers can read: {error}") from error


def _summary(request: Request, model: Any, decoder: Decoder, text: str, count: int, timing: dict) -> dict:
    loaded = model.nvfp4
    some = next(iter(loaded.weights.values()))
    return {
        "schema": 1,
        "request": asdict(request),
        "model": str(loaded.checkpoint.path),
        "device": str(decoder.device),
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        "precision": loaded.precision,
        "backend": some.backend,
        "why": explain(some).splitlines(),
        "expert_bytes": loaded.expert_bytes,
        "expert_bytes_over_bf16": loaded.expert_bytes / (2 * loaded.expert_parameters),
        "layers": len(experts_of(model)),
        "compiled": decoder.why_eager is None,
        "why_eager": decoder.why_eager,
        "graphs": decoder.graphs(),
        "scales": loaded.report.to_dict(),
        "scale_report": str(loaded.report).splitlines(),
        "tokens": count,
        "text": text,
        **timing,
    }


def _table(s: dict) -> str:
    how = "compiled fullgraph" if s["compiled"] else f"eager ({s['why_eager']})"
    graphs = f", {s['graphs']} CUDA graphs" if s["device"].startswith("cuda") else ", no CUDA graphs on a CPU"
    lines = [
        f"model      {s['model']}",
        f"scales     {s['scale_report'][0]}",
        *(f"         {line}" for line in s["scale_report"][1:]),
        f"precision  {s['precision']}, everything else {s['dtype']}; experts {s['expert_bytes'] / 1e6:.1f} MB, "
        f"{s['expert_bytes_over_bf16']:.3f} of bfloat16",
        f"backend    {s['backend']} on {s['device']}",
        *(f"           {line}" for line in s["why"]),
        f"decode     {how}{graphs}; load {s['load_seconds']:.1f} s, compile {s['compile_seconds']:.1f} s",
        f"speed      {s['tokens']} tokens in {s['generate_seconds']:.2f} s with the prompt, "
        f"{s['tokens_per_second']:.0f} tokens/s",
    ]
    for layer, row in enumerate(s.get("health", ())):
        idle = sum(t == 0 for t in row["tokens"])
        lines.append(
            f"health     layer {layer}: {row['rows']} rows, {row['nonfinite_in_rows']} with non-finite input, "
            f"{row['nonfinite_out_rows']} with non-finite output, {row['ids_out_of_range']} ids out of range, "
            f"amax {row['amax_in']:.3g} -> {row['amax_out']:.3g}, {idle} experts idle"
        )
    return "\n" + "\n".join(lines)
