"""Experts ready to serve: validated tensors at stable addresses, and what will run them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import native, sm90
from .errors import NVFP4Error, ScaleError, ShapeError
from .format import PRECISIONS, is_gated
from .raw import ExpertsSpec, RawExperts
from .report import ScaleReport
from .sm90 import packing
from .sm90.layout import unpack
from .validate import REPAIRS, check

POLICIES = ("raise", "report", "unchecked")
"""Refuse what is wrong; return it with the report and serve it visibly wrong; or look at nothing (dummy weights)."""
LAYOUTS = ("checkpoint", "sm90")
"""As on disk, which every kernel reads; packed for Hopper's own kernels."""
ARGUMENTS = (
    "w13", "w13_block_scale", "w13_global_scale", "w2", "w2_block_scale", "w2_global_scale",
    "a13_scale", "a2_scale", "w13_bias", "w2_bias",
)  # fmt: skip
"""The tensors of ``torch.ops.nvfp4.moe`` after the routing, in its order."""


@dataclass(frozen=True)
class Candidate:
    """One implementation that could run a layer, and why it does or does not."""

    name: str
    taken: bool
    why: str


class ExpertWeights:
    """One layer of experts; call it, or pass ``arguments()`` and ``constants()`` to ``torch.ops.nvfp4.moe``.

    Attributes:
        spec, precision: what these weights are, and how activations are treated. layout: of the tensors.
        tensors: the op's tensors by name; their addresses never change.
        candidates: the implementations considered at finalize.
    """

    def __init__(
        self, spec: ExpertsSpec, precision: str, layout: str, tensors: dict[str, Tensor], policy: str, repairs: tuple
    ) -> None:
        self.spec, self.precision, self.layout, self.tensors = spec, precision, layout, tensors
        self._policy, self._repairs = policy, repairs
        self.candidates = candidates(tensors["w13"].device, layout, spec.num_experts)

    @property
    def backend(self) -> str:
        """Name of the implementation that runs."""
        return next(c.name for c in self.candidates if c.taken)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.numel() * t.element_size() for t in self.tensors.values())

    def arguments(self) -> list[Tensor | None]:
        """Tensor arguments in the op's order."""
        return [self.tensors.get(name) for name in ARGUMENTS]

    def constants(self) -> dict:
        """Keyword arguments of the op."""
        s = self.spec
        return {
            "activation": s.activation, "precision": self.precision, "layout": self.layout,
            "alpha": s.alpha, "beta": s.beta, "limit": s.limit,
        }  # fmt: skip

    def __call__(
        self,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        expert_map: Tensor | None = None,
        health: Tensor | None = None,
    ) -> Tensor:
        """Run the layer; see ``nvfp4.moe``. With ``health``, a row of ``nvfp4.health.buffer`` is added to."""
        if health is None:
            return torch.ops.nvfp4.moe(x, topk_ids, topk_weights, *self.arguments(), expert_map, **self.constants())
        return torch.ops.nvfp4.moe.health(
            x, topk_ids, topk_weights, *self.arguments(), expert_map, health, **self.constants()
        )

    def update_(self, raw: RawExperts) -> ScaleReport:
        """Take new values at the same addresses, so that captured graphs see them; raw is used up.

        Raises:
            ShapeError: another spec. ScaleError: the new values are refused; the old ones stay as they are.
        """
        if raw.spec != self.spec:
            raise ShapeError(f"these weights are {self.spec}, the update is {raw.spec}; they must agree")
        tensors, report = _validated(raw, self.precision, self._policy, self._repairs)
        if self.layout == "sm90":
            for name in ("w13", "w2"):
                codes, scale = (tensors.pop(n).to(self.tensors[name].device) for n in (name, f"{name}_block_scale"))
                store = self.tensors[name].flatten(1)
                packing.pack_experts(codes, scale, _gated(self.spec, name), store)
            _pad_biases(self.spec, tensors)
        for name, value in tensors.items():
            self.tensors[name].copy_(value)
        return report

    def checkpoint(self, expert: int) -> dict[str, Tensor]:
        """Codes and block scales of one expert in the layout of the checkpoint, views where they lie so.

        In the layout "sm90", blocks whose scale was zero come back with zero codes, whatever they held.
        """
        names = ("w13", "w13_block_scale", "w2", "w2_block_scale")
        if self.layout == "checkpoint":
            return {name: self.tensors[name][expert] for name in names}
        h, i = self.spec.hidden_size, self.spec.intermediate_size
        found: dict[str, Tensor] = {}
        for name, rows, k in (("w13", i, h), ("w2", h, i)):
            packed = self.tensors[name][expert]
            found[name], found[f"{name}_block_scale"] = unpack(packed, rows, k, _gated(self.spec, name))
        return found


def finalize(
    raw: RawExperts,
    precision: str = "w4a16",
    policy: str = "raise",
    repairs: tuple[str, ...] = (),
    device: torch.device | str | None = None,
    layout: str = "auto",
) -> tuple[ExpertWeights, ScaleReport]:
    """Check every scale that this precision consumes, once, and hand the buffers over.

    Args:
        raw: filled experts; used up by this call unless it raises.
        precision: "w4a16", "w4a4_static" (the checkpoint's activation scales, one per expert; gate and up feed one x,
            so their maximum), or "w4a4_per_token".
        policy: "raise" refuses what is wrong. "report" returns it with the report. "unchecked" is for dummy weights.
        repairs: names from ``nvfp4.REPAIRS``, each applied only where needed and listed in the report.
        device: where the weights shall live; default where they are.
        layout: "checkpoint", "sm90", or "auto": "sm90" where its kernels can run. ``explain`` says which and why.
            Packing happens in place, an expert at a time; weights that were loaded elsewhere, or into buffers of
            somebody else, take a projection's worth of memory more while they are packed.

    Returns:
        The weights and the report.

    Raises:
        ScaleError: something was refused; ``.report`` tells all.
        ShapeError, NVFP4Error: an unknown precision, policy, repair or layout; a layout whose kernels cannot run on
            this GPU; raw already used.
    """
    _known("precision", precision, PRECISIONS)
    _known("policy", policy, POLICIES)
    for repair in repairs:
        _known("repair", repair, tuple(REPAIRS))
    _known("layout", layout, ("auto", *LAYOUTS))
    here = raw.tensors["w13"].device if "w13" in raw.tensors else raw.device
    place = torch.empty(0, device=here if device is None else device).device  # with its index
    layout = _layout(layout, raw.spec, place)
    tensors, report = _validated(raw, precision, policy, tuple(repairs))
    stores, raw.stores = raw.stores, {}
    for name in ("w13", "w2"):
        codes, scale = tensors[name], tensors[f"{name}_block_scale"]
        if layout == "sm90":
            store = stores.pop(name, None) if codes.device == place else None
            packed = packing.pack_experts(codes.to(place), scale.to(place), _gated(raw.spec, name), store)
            tensors[name], tensors[f"{name}_block_scale"] = packing.arguments(packed)
        else:
            tensors[name], tensors[f"{name}_block_scale"] = codes.to(place).contiguous(), scale.to(place).contiguous()
        del codes, scale
    if layout == "sm90":
        _pad_biases(raw.spec, tensors)
    tensors = {name: t if t.device == place else t.to(place) for name, t in tensors.items()}
    return ExpertWeights(raw.spec, precision, layout, tensors, policy, tuple(repairs)), report


def _layout(asked: str, spec: ExpertsSpec, place: torch.device) -> str:
    """The layout that "auto" means, or the one that was asked for; a CPU reads any, slowly where it has to unpack."""
    why = sm90.unavailable(place, spec.num_experts)
    if asked == "sm90" and why and place.type != "cpu":
        raise NVFP4Error(f"{spec.layer}: layout 'sm90' cannot be served: {why}; take 'checkpoint' or 'auto'")
    return ("checkpoint" if why else "sm90") if asked == "auto" else asked


def _gated(spec: ExpertsSpec, name: str) -> bool:
    return name == "w13" and is_gated(spec.activation)


def _pad_biases(spec: ExpertsSpec, tensors: dict[str, Tensor]) -> None:
    """The first bias, as wide as the packed features of each part; what is added is zero."""
    if "w13_bias" in tensors:
        extra = packing.padded(spec.intermediate_size) - spec.intermediate_size
        parts = tensors["w13_bias"].unflatten(1, (-1, spec.intermediate_size))
        tensors["w13_bias"] = torch.nn.functional.pad(parts, (0, extra)).flatten(1)


def _known(what: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise NVFP4Error(f"{what} is {value!r}; known are {', '.join(allowed)}")


def _validated(raw: RawExperts, precision: str, policy: str, repairs: tuple) -> tuple[dict[str, Tensor], ScaleReport]:
    if not raw.tensors:
        raise NVFP4Error(f"{raw.spec.layer}: these experts were finalized already; make new RawExperts to load again")
    if raw.scales_only:
        raise NVFP4Error(f"{raw.spec.layer}: these experts hold scales only; use nvfp4.check, or load the weights too")
    if policy == "unchecked":
        report = ScaleReport(precision, layers=1, experts=raw.spec.num_experts)
    else:
        report = check(raw, precision, repairs)
        if policy == "raise" and not report.ok:
            raise ScaleError(report)
    tensors = raw.release()
    a13, a2 = tensors.pop("a13_scale"), tensors.pop("a2_scale")
    if precision == "w4a4_static":
        tensors |= {"a13_scale": a13.amax(1), "a2_scale": a2}
    return tensors, report


def candidates(device: torch.device, layout: str = "checkpoint", experts: int = 1) -> tuple[Candidate, ...]:
    """Every implementation of the layer and why it is or is not taken on this device, for this layout."""
    cpu = device.type == "cpu"
    elsewhere = f"weights are on {device}"
    built = native.build() if cpu else native.Build(None, elsewhere)
    fallback = cpu and built.library is None
    cuda = device.type == "cuda"
    why = sm90.unavailable(device, experts)
    fast = cuda and layout == "sm90"
    own = "serves bfloat16; float16 and float32 take the portable kernels" if fast else why or f"layout is {layout}"
    portable = f"runs on {torch.cuda.get_device_name(device)}" if cuda else elsewhere
    return (
        Candidate("cuda sm90", fast, own),
        Candidate("triton portable", cuda and not fast, "for float16 and float32" if fast else portable),
        Candidate("cpu c++", built.library is not None, built.why),
        Candidate("cpu torch", fallback, built.why if fallback or not cpu else "only where the C++ kernel is missing"),
    )


def explain(weights: ExpertWeights) -> str:
    """Every candidate implementation and why it was or was not taken, a line each."""
    return "\n".join(f"{'->' if c.taken else '  '} {c.name}: {c.why}" for c in weights.candidates)


def warmup(
    weights: ExpertWeights,
    tokens: tuple[int, ...] = (1, 16, 64, 256, 1024),
    *,
    top_k: int,
    dtype: torch.dtype = torch.bfloat16,
    expert_map: Tensor | None = None,
) -> None:
    """Compile whatever these batch sizes need, so that a CUDA graph capture finds everything ready."""
    device = weights.tensors["w13"].device
    experts = weights.spec.num_experts
    for m in tokens:
        x = torch.zeros(m, weights.spec.hidden_size, dtype=dtype, device=device)
        ids = torch.arange(m * top_k, device=device).reshape(m, top_k).remainder(experts)
        for id_type in (torch.int32, torch.int64):
            weights(x, ids.to(id_type), torch.ones(m, top_k, device=device), expert_map)
