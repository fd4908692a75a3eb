"""Other implementations of the same layer, each optional: a function of (x, ids, router), made from a layer's codes.

Whatever is not installed, does not compile or gives wrong results is told by its reason; the run goes on without it.
"""

from __future__ import annotations

import functools
import importlib.util
import json
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from bench.layer import Layer
from bench.shapes import Shape
from nvfp4.kernels.ids import sort_slots

Run = Callable[[Tensor, Tensor, Tensor], Tensor]


class PeerError(RuntimeError):
    """Why a peer takes no part."""


def _grouped(x: Tensor, ids: Tensor, router: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """Sort, two grouped products over bfloat16 weights [E, K, N], weighted sum."""
    experts, top_k = w13.shape[0], ids.shape[1]
    order = ids.flatten().argsort(stable=True)
    ones = torch.ones(ids.numel(), dtype=torch.int32, device=x.device)
    counts = torch.zeros(experts, dtype=torch.int32, device=x.device).scatter_add_(0, ids.flatten().long(), ones)
    offsets = counts.cumsum(0, dtype=torch.int32)
    g, u = F.grouped_mm(x[order // top_k], w13, offs=offsets).chunk(2, dim=-1)
    y = F.grouped_mm((F.silu(g) * u).contiguous(), w2, offs=offsets)
    return _unsorted_sum(y, order, router)


def _unsorted_sum(y: Tensor, order: Tensor, router: Tensor) -> Tensor:
    """Rows in the order of ``order`` back to their slots, then summed by weight."""
    weighted = y.float() * router.flatten()[order].unsqueeze(1)
    slots = torch.empty_like(weighted).index_copy_(0, order.long(), weighted)
    return slots.view(*router.shape, -1).sum(1).to(y.dtype)


def _weighted_sum(y: Tensor, router: Tensor) -> Tensor:
    return (y.view(*router.shape, -1).float() * router.unsqueeze(-1)).sum(1).to(y.dtype)


def _silu_mul(y: Tensor) -> Tensor:
    g, u = y.float().chunk(2, dim=-1)
    return (F.silu(g) * u).to(y.dtype)


def _gather(x: Tensor, order: Tensor, top_k: int) -> Tensor:
    return x[order // top_k]


@functools.cache
def _compiled(function: Callable) -> Callable:
    return torch.compile(function, fullgraph=True, dynamic=True)


def torch_grouped_mm(layer: Layer) -> Run:
    """Grouped products of torch over bfloat16 weights, sort and sum included, compiled."""
    w13, w2 = (w.transpose(1, 2) for w in layer.bfloat16)
    return lambda x, ids, router: _compiled(_grouped)(x, ids, router, w13, w2)


def transformers_grouped_mm(layer: Layer) -> Run:
    """Experts of transformers in bfloat16 as its models call them, implementation "grouped_mm"."""
    from transformers.integrations.moe import use_experts_implementation

    class Experts(torch.nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.num_experts = layer.shape.experts
            self.hidden_dim, self.intermediate_dim = layer.shape.hidden, layer.shape.inter
            self.gate_up_proj, self.down_proj = (torch.nn.Parameter(w, requires_grad=False) for w in layer.bfloat16)
            self.act_fn = F.silu

        def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            raise PeerError("transformers did not take its grouped_mm implementation")

    return use_experts_implementation(Experts)(SimpleNamespace(_experts_implementation="grouped_mm"))


@triton.jit
def _align(
    starts, order, aligned, block_expert, total, R, E,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, E_BLOCK: tl.constexpr,
):  # fmt: skip
    """Sorted slots in blocks of one expert each, padded with R; one program per expert."""
    e = tl.program_id(0)
    lane = tl.arange(0, E_BLOCK)
    begin = tl.load(starts + lane, mask=lane < E, other=0)
    end = tl.load(starts + lane + 1, mask=lane < E, other=0)
    blocks = (end - begin + BLOCK - 1) // BLOCK
    before = tl.sum(tl.where(lane < e, blocks, 0), axis=0)
    mine = tl.sum(tl.where(lane == e, blocks, 0), axis=0)
    if e == 0:
        tl.store(total, tl.sum(blocks, axis=0) * BLOCK)
    first, last = tl.load(starts + e), tl.load(starts + e + 1)
    row = tl.arange(0, ROWS)
    for block in range(mine):
        at = first + block * BLOCK + row
        slot = tl.load(order + at, mask=(row < BLOCK) & (at < last), other=R)
        tl.store(aligned + (before + block) * BLOCK + row, slot, mask=row < BLOCK)
        tl.store(block_expert + before + block, e)


def _sort(ids: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Where each expert's slots begin, int32 [E + 1], and the slots in that order: one launch."""
    slots = ids.numel()
    starts = ids.new_empty(experts + 1, dtype=torch.int32)
    order = ids.new_empty(slots, dtype=torch.int32)
    block = min(max(triton.next_power_of_2(slots), 16), 1024)
    sort_slots[(experts,)](ids, None, starts, order, None, slots, experts, experts, TOKENS_FIELD=0, BLOCK=block)
    return starts, order


class Humming:
    """Humming's NVFP4 products with bfloat16 activations, through its own layer class and heuristics.

    ``kind`` is its GEMM type: "indexed" reads the rows of x through sorted ids, in blocks of one expert, as vLLM calls
    it; "grouped_contiguous" takes rows already in order.
    """

    def __init__(self, layer: Layer, kind: str) -> None:
        self.experts, self.kind = layer.shape.experts, kind
        self.compute = json.dumps({"gemm_type": kind})
        self.tunings: dict[tuple[int, int], tuple[str, int]] = {}
        if "humming" not in layer.shared:
            h, i = layer.shape.hidden, layer.shape.inter
            layer.shared["humming"] = (
                self._part(2 * i, h, layer.w13, layer.s13, layer.g13[:, 0]),
                self._part(h, i, layer.w2, layer.s2, layer.g2),
            )
        self.parts = layer.shared["humming"]

    def _part(self, n: int, k: int, codes: Tensor, scales: Tensor, global_scale: Tensor) -> Any:
        from humming.layer import HummingLayer

        with torch.device("cuda"):
            part = HummingLayer(
                shape_n=n, shape_k=k, num_experts=self.experts, torch_dtype=torch.bfloat16,
                weight_config={"quant_method": "modelopt", "quant_algo": "nvfp4"}, **PADDING,
            )  # fmt: skip
        scales = scales.view(torch.float8_e4m3fn)
        part.load_from_tensors({"weight": codes, "weight_scale": scales, "weight_scale_2": global_scale.contiguous()})
        part.transform()
        return part

    def tuning(self, part: int, slots: int) -> tuple[str, int]:
        """What its heuristics choose for so many rows, and the rows of its blocks."""
        if (part, slots) not in self.tunings:
            self.tunings[part, slots] = _humming_tuning(self.parts[part].humming_config, self.kind, slots)
        return self.tunings[part, slots]

    def __call__(self, x: Tensor, ids: Tensor, router: Tensor) -> Tensor:
        starts, order = _sort(ids, self.experts)
        if self.kind != "indexed":
            rows = _compiled(_gather)(x, order, ids.shape[1])
            places = {"expert_layout": starts}
            y = self._product(0, rows, ids.numel(), 1, places)
            y = self._product(1, _compiled(_silu_mul)(y), ids.numel(), 1, places)
            return _compiled(_unsorted_sum)(y, order, router)
        blocks = [self.tuning(part, ids.numel())[1] for part in (0, 1)]
        aligned = {block: self._aligned(starts, order, block) for block in set(blocks)}
        y = self._product(0, x, ids.numel(), ids.shape[1], aligned[blocks[0]])
        y = self._product(1, _compiled(_silu_mul)(y), ids.numel(), 1, aligned[blocks[1]])
        return _compiled(_weighted_sum)(y, router)

    def _product(self, part: int, rows: Tensor, slots: int, top_k: int, places: dict) -> Tensor:
        tuning, _ = self.tuning(part, slots)
        config = {"compute_config": self.compute, "tuning_config": tuning}
        return self.parts[part](rows, top_k=top_k, **places, **config)

    def _aligned(self, starts: Tensor, order: Tensor, block: int) -> dict[str, Tensor]:
        slots = order.numel()
        most = min(slots, self.experts + slots // block)  # as many blocks as there can be
        aligned = order.new_empty(most * block)
        experts, total = order.new_empty(most), order.new_empty(1)
        _align[(self.experts,)](
            starts, order, aligned, experts, total, slots, self.experts, BLOCK=block,
            ROWS=triton.next_power_of_2(block), E_BLOCK=triton.next_power_of_2(self.experts),
        )  # fmt: skip
        return {"sorted_ids": aligned, "expert_ids": experts, "num_tokens_padded": total}


PADDING = {"pad_n_to_multiple": 128, "pad_k_to_multiple": 64}
"""Humming's fastest kernels want these; only the 2880 of gpt-oss-120b is not such a multiple already."""


def _humming_tuning(config: Any, kind: str, slots: int) -> tuple[str, int]:
    from humming.tune import get_heuristics_config

    tuning = get_heuristics_config(config, shape_m=slots, gemm_type=kind)
    return json.dumps(tuning), tuning["block_shape"][0]


def compile_humming(shapes: Iterable[Shape], tokens: Iterable[int]) -> None:
    """Compile in parallel whatever these layers and batch sizes will ask for: one by one it takes minutes."""
    from humming import dtypes
    from humming.config.enum import WeightScale2Type, WeightScaleType
    from humming.kernel.humming import HummingKernel
    from humming.schema import HummingWeightSchema
    from humming.transform import prepare_layer_config

    schema = HummingWeightSchema(
        b_dtype=dtypes.float4e2m1, bs_dtype=dtypes.float8e4m3, weight_scale_group_size=16,
        weight_scale_type=WeightScaleType.GROUP, weight_scale_2_type=WeightScale2Type.TENSOR,
    )  # fmt: skip
    specs: dict[str, dict] = {}
    for shape in shapes:
        for n, k in ((2 * shape.inter, shape.hidden), (shape.hidden, shape.inter)):
            config = prepare_layer_config(
                n, k, schema, num_experts=shape.experts, torch_dtype=torch.bfloat16, device=0, **PADDING
            )
            for kind in KINDS:
                for count in tokens:
                    if not _takes_part(kind, shape, count):
                        continue
                    tuning, _ = _humming_tuning(config, kind, count * shape.top_k)
                    resolved = HummingKernel._resolve_configs(config.to_str(), {"gemm_type": kind}, tuning, 0)
                    spec = {key: v for part in resolved for key, v in part.items() if key != "num_sms"}
                    specs[json.dumps(spec, default=str)] = spec
    HummingKernel.compile_many([(HummingKernel, spec) for spec in specs.values()], 0)


KINDS = {"indexed": "humming", "grouped_contiguous": "humming grouped"}


def _takes_part(kind: str, shape: Shape, tokens: int) -> bool:
    """Whether a GEMM type is worth its compilation: rows in order pay where experts have several."""
    return kind == "indexed" or tokens * shape.top_k >= 4 * shape.experts


def vllm_fused_moe(layer: Layer) -> Run:
    """The fused_moe of vLLM over bfloat16 weights."""
    from vllm.model_executor.layers.fused_moe import fused_experts

    w13, w2 = layer.bfloat16
    return lambda x, ids, router: fused_experts(x, w13, w2, router, ids)


def triton_kernels(layer: Layer) -> Run:
    """Of another format."""
    raise PeerError("its weights are MXFP4: not the same codes")


PEERS: dict[str, tuple[str, Callable[[Layer], Run]]] = {
    "torch grouped_mm bf16": ("torch", torch_grouped_mm),
    "humming": ("humming", lambda layer: Humming(layer, "indexed")),
    "humming grouped": ("humming", lambda layer: Humming(layer, "grouped_contiguous")),
    "transformers grouped_mm bf16": ("transformers", transformers_grouped_mm),
    "vllm fused_moe bf16": ("vllm", vllm_fused_moe),
    "triton_kernels": ("triton_kernels", triton_kernels),
}
"""By name: the package it needs, and how it is made. In the order in which they are measured."""


def why(error: Exception) -> str:
    """An error in one line."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:300] if text else 'no message'}"


class Peers:
    """The peers of one layer: made when first asked for, left out once they could not be made or failed twice."""

    def __init__(self, layer: Layer, names: Iterable[str]) -> None:
        self.layer, self.names = layer, list(names)
        self.made: dict[str, Run] = {}
        self.absent: dict[str, str] = {}
        self.failures: dict[str, int] = {}

    def failed(self, name: str, error: Exception) -> str:
        """Note that a peer failed at a point; the reason in one line."""
        self.failures[name] = self.failures.get(name, 0) + 1
        if self.failures[name] > 1:
            self.absent[name] = why(error)
        return why(error)

    def at(self, tokens: int) -> list[str]:
        """Those that take part at a batch size, except what failed."""
        kinds = {name: kind for kind, name in KINDS.items()}
        shape = self.layer.shape
        present = [n for n in self.names if n not in self.absent]
        return [n for n in present if n not in kinds or _takes_part(kinds[n], shape, tokens)]

    def get(self, name: str) -> Run | None:
        """The peer, or None with its reason in ``absent``."""
        if name in self.absent:
            return None
        package, make = PEERS[name]
        if name not in self.made:
            if importlib.util.find_spec(package) is None:
                self.absent[name] = "not installed"
                return None
            try:
                self.made[name] = make(self.layer)
            except Exception as error:  # whatever a package raises: it takes no part, and the reason is kept
                self.absent[name] = why(error)
                return None
        return self.made[name]
