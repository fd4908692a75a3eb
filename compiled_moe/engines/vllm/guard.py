"""The checks of finalize in front of vLLM's own NVFP4 experts, whatever backend runs them.

vLLM inverts activation scales without a look, and does not notice a tensor that no file holds. The guard records what
its loader writes, and before anything is folded checks what the chosen backend consumes. Sound weights pass untouched.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.oracle import nvfp4 as oracle
from vllm.model_executor.layers.quantization import modelopt
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w4a4_nvfp4 as compressed_tensors,
)
from vllm.model_executor.utils import is_weights_pre_processed

from nvfp4 import ExpertsSpec, Finding, RawExperts, ScaleError, ScaleReport, check, rules

from ...names import SUFFIXES
from .config import dummy
from .experts import BUFFERS, SHARDS, TENSORS, WAY_OUT, as_served

METHODS = {
    modelopt.ModelOptNvFp4FusedMoE: "modelopt",
    compressed_tensors.CompressedTensorsW4A4Nvfp4MoEMethod: "compressed-tensors",
}
"""vLLM's classes and whose names they give to tensors."""
_WEIGHT_ONLY = ("MARLIN", "HUMMING")
INVERTS = "make_nvfp4_moe_quant_config"
RECORD = "_nvfp4_guard"
_checked: ContextVar[bool] = ContextVar("checked", default=False)


def install() -> None:
    """Put the guard in place, once."""
    for method, form in METHODS.items():
        if not hasattr(method.create_weights, "__wrapped__"):
            method.create_weights = _recording(method.create_weights, form)
            method.process_weights_after_loading = _checking(method.process_weights_after_loading, form)
    stock: Any = vars(oracle)[INVERTS]
    if hasattr(stock, "__wrapped__"):
        return
    guarded = _inverting(stock)
    for name, module in list(sys.modules.items()):  # those that imported it by name before
        if name.startswith("vllm.") and vars(module).get(INVERTS) is stock:
            setattr(module, INVERTS, guarded)


def consumed(backend: Any, use_a16: bool, per_token: bool = False) -> str:
    """The precision whose scales a backend of vLLM reads."""
    if backend.value in _WEIGHT_ONLY or oracle._use_a16(backend, use_a16):
        return "w4a16"
    return "w4a4_per_token" if per_token else "w4a4_static"


def _recording(create_weights: Any, form: str) -> Any:
    @functools.wraps(create_weights)
    def guarded(self, layer, *args: Any, **extra: Any) -> None:
        load = extra["weight_loader"]
        record: dict[tuple[int, str, str], list[str]] = {}
        layer.__dict__[RECORD] = record
        layer.__dict__[RECORD + "_dummy"] = dummy()

        @functools.wraps(load)
        def weight_loader(param, loaded_weight, weight_name, shard_id, expert_id, return_success=False):
            done = load(param, loaded_weight, weight_name, shard_id, expert_id, True)
            name = next((n for n in _names(form) if getattr(layer, n, None) is param), None)
            if done and name is not None and not param.is_meta:  # a reload first counts on the meta device
                tensor = SUFFIXES[name.partition("_")[2]][0]
                for expert, shard in _covered(layer, param, loaded_weight, shard_id, expert_id):
                    _note(record, layer, self, (tensor, shard, expert), weight_name)
            return done if return_success else None

        create_weights(self, layer, *args, **extra | {"weight_loader": weight_loader})

    return guarded


def _names(form: str) -> list[str]:
    return [f"{part}_{suffix}" for part in ("w13", "w2") for suffix in TENSORS[form]]


def _covered(layer: Any, param: Tensor, value: Tensor, shard: str, expert: int) -> list[tuple[int, str]]:
    """Global experts and shards that one call fills; a tensor of three sizes holds all experts of this rank."""
    if value.dim() < 3:
        return [(expert, shard)]
    whole = value.shape[-2] == param.shape[-2] * layer.moe_config.tp_size
    both = shard == "w1" and layer.moe_config.is_act_and_mul and whole
    table = layer._expert_map
    experts = range(param.shape[0]) if table is None else table.ge(0).nonzero().flatten().tolist()
    return [(e, s) for e in experts for s in (("w1", "w3") if both else (shard,))]


def _note(record: dict, layer: Any, method: Any, what: tuple[str, str, int], source: str) -> None:
    """Record a write under the local expert, and activation scales under the global one where all ranks read them."""
    tensor, shard, expert = what
    local = layer._map_global_expert_id_to_local_expert_id(expert)
    if local >= 0:
        record.setdefault((local, SHARDS[shard], tensor), []).append(source)
    if tensor == "input_scale" and method.use_global_sf:
        record.setdefault((expert, SHARDS[shard], "global input_scale"), []).append(source)


def _checking(process: Any, form: str) -> Any:
    @functools.wraps(process)
    def guarded(self, layer) -> None:
        record = layer.__dict__.get(RECORD, {})
        if not layer.__dict__.get(RECORD + "_dummy") and not is_weights_pre_processed():
            report = _check(self, layer, record, form)
            if not report.ok:
                raise ScaleError(report)
        record.clear()
        with _inside():
            process(self, layer)

    return guarded


@contextlib.contextmanager
def _inside() -> Iterator[None]:
    token = _checked.set(True)
    try:
        yield
    finally:
        _checked.reset(token)


def _check(method: Any, layer: Any, record: dict, form: str) -> ScaleReport:
    """All rules of finalize over vLLM's own tensors, which are looked at and left alone."""
    precision = consumed(method.nvfp4_backend, method.use_a16, getattr(method, "per_token_activation", False))
    raw = _scales(method, layer, form)
    everywhere = raw.tensors.pop("everywhere", None)
    raw.sources = {key: sources for key, sources in record.items() if key[2] != "global input_scale"}
    report = as_served(check(raw, precision), layer)
    if everywhere is not None and precision == "w4a4_static":
        ids = {key[:2]: sources for key, sources in record.items() if key[2] == "global input_scale"}
        report.findings += _activation_of_all(raw.spec, everywhere, ids, report)
    return report


def _scales(method: Any, layer: Any, form: str) -> RawExperts:
    """The layer's scales as RawExperts, without padding; activation scales of all ranks under "everywhere"."""
    gated, config = method.moe.is_act_and_mul, layer.moe_config
    found = {}
    for suffix in TENSORS[form]:
        canonical, encode = SUFFIXES[suffix]
        for part, buffer in zip(("w13", "w2"), BUFFERS[canonical], strict=True):
            value = getattr(layer, f"{part}_{suffix}").data
            found[buffer] = 1 / value if encode else value
    experts, wide, packed = found["w2"].shape
    hidden = min(wide, config.hidden_dim_unpadded or wide)
    inter = min(2 * packed, config.intermediate_size_per_partition_unpadded or 2 * packed)
    name = layer.layer_name.removesuffix(".routed_experts")
    spec = ExpertsSpec(experts, hidden, inter, "silu" if gated else "relu2", False, name)

    def rows(w: Tensor) -> Tensor:
        halves = w.unflatten(1, (2, -1)) if gated else w.unsqueeze(1)
        return halves[:, :, :inter].flatten(1, 2)

    def codes(expert: int, projection: str) -> Tensor:
        if projection == "down_proj":
            return found["w2"][expert, :hidden, : inter // 2]
        half = rows(found["w13"])[expert, :, : hidden // 2]
        return half[inter * (projection == "up_proj") :][:inter]

    raw = RawExperts.of(spec, "meta", codes)
    raw.device = found["w2"].device
    parts = len(spec.projections) - 1
    raw.tensors |= {
        "w13_block_scale": rows(found["w13_block_scale"].view(torch.uint8))[:, :, : hidden // 16],
        "w2_block_scale": found["w2_block_scale"].view(torch.uint8)[:, :hidden, : inter // 16],
        "w13_global_scale": found["w13_global_scale"].reshape(experts, parts),
        "w2_global_scale": found["w2_global_scale"].reshape(experts),
    }
    a13, a2 = found["a13_scale"].reshape(-1, parts), found["a2_scale"].reshape(-1)
    if method.use_global_sf and len(a2) != experts:
        raw.tensors["everywhere"] = torch.cat([a13, a2[:, None]], 1)
        own = layer._expert_map.ge(0).nonzero().flatten().to(a2.device)
        a13, a2 = a13[own], a2[own]
    raw.tensors |= {"a13_scale": a13, "a2_scale": a2}
    return raw


def _activation_of_all(spec: ExpertsSpec, scales: Tensor, ids: dict, local: ScaleReport) -> list[Finding]:
    """Faults among the activation scales of experts on other ranks: these backends fold all of them into one."""
    known = {(f.expert, f.projection) for f in local.findings if f.tensor == "input_scale"}
    findings = []
    for p, projection in enumerate(spec.projections):
        values = scales[:, p].float().cpu().numpy()
        written = np.array([(e, projection) in ids for e in range(len(values))])
        faults = [(int(e), "missing", "no file holds this tensor") for e in np.flatnonzero(~written)]
        faults += rules.faults(values, written)
        for e, kind, rule in faults:
            if (e, projection) not in known:
                findings.append(_finding(spec.layer, e, projection, "input_scale", kind, values[e], rule))
    return findings


def _finding(layer: str, e: int, projection: str, tensor: str, kind: str, value: float, rule: str) -> Finding:
    text = "" if kind == "missing" else f"{value:.6g}"
    action = WAY_OUT if tensor == "input_scale" else "fix or re-export the checkpoint"
    return Finding(layer, e, projection, tensor, kind, text, rule, action, "error")


def _inverting(make: Any) -> Any:
    """Guard the function that inverts, for callers other than the two methods."""

    @functools.wraps(make)
    def guarded(
        backend, w13_scale, w2_scale, w13_scale_2, w2_scale_2, a13_scale, a2_scale, *args: Any, **kwargs: Any
    ) -> Any:
        if not _checked.get() and not dummy():
            use_a16 = kwargs.get("use_a16", args[4] if len(args) > 4 else False)
            report = _values(backend, use_a16, (w13_scale_2, w2_scale_2, a13_scale, a2_scale), kwargs.get("layer"))
            if not report.ok:
                raise ScaleError(report)
        return make(backend, w13_scale, w2_scale, w13_scale_2, w2_scale_2, a13_scale, a2_scale, *args, **kwargs)

    return guarded


def _values(backend: Any, use_a16: bool, scales: tuple[Tensor | None, ...], layer: Any) -> ScaleReport:
    precision = consumed(backend, use_a16)
    names = [("gate_up_proj", "weight_scale_2"), ("down_proj", "weight_scale_2")]
    names += [("gate_up_proj", "input_scale"), ("down_proj", "input_scale")] if precision != "w4a16" else []
    report = ScaleReport(precision, layers=1)
    name = getattr(layer, "layer_name", f"experts of {backend.value}")
    for (projection, tensor), scale in zip(names, scales, strict=False):
        if scale is None:
            continue
        values = scale.detach().float().reshape(len(scale) if scale.dim() else 1, -1).cpu().numpy()
        report.experts = max(report.experts, len(values))
        for column in values.T:
            for e, kind, rule in rules.faults(column, np.ones(len(column), dtype=bool)):
                if (tensor, kind) != ("weight_scale_2", "zero"):  # legal over codes that are all zero, not seen here
                    report.findings.append(_finding(name, e, projection, tensor, kind, column[e], rule))
    return report
