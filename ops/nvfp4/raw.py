"""Experts as a checkpoint gives them: canonical tensors on the device, and who wrote which slot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import ShapeError
from .format import ACTIVATIONS, GROUP, NAN_SCALE, is_gated
from .registry import as_bytes
from .sm90 import packing, unavailable

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
TENSORS = ("weight", "weight_scale", "weight_scale_2", "input_scale", "bias")
"""ModelOpt's names, used for every format; global scales in decode convention."""
_BUFFERS = {
    "weight": ("w13", "w2"),
    "weight_scale": ("w13_block_scale", "w2_block_scale"),
    "weight_scale_2": ("w13_global_scale", "w2_global_scale"),
    "input_scale": ("a13_scale", "a2_scale"),
    "bias": ("w13_bias", "w2_bias"),
}
"""Where each lies: into the layer, and out of it."""


@dataclass(frozen=True)
class ExpertsSpec:
    """What a layer of experts is, apart from its numbers.

    Attributes:
        num_experts: experts held here (local ones, under expert parallelism).
        hidden_size, intermediate_size: multiples of 16.
        activation, alpha, beta, limit: see ``nvfp4.moe``.
        bias: whether the projections carry biases.
        layer: name for messages, such as "model.layers.0.mlp.experts".
    """

    num_experts: int
    hidden_size: int
    intermediate_size: int
    activation: str = "silu"
    bias: bool = False
    layer: str = "experts"
    alpha: float = 1.0
    beta: float = 0.0
    limit: float | None = None

    def __post_init__(self) -> None:
        """State each constraint once."""
        if self.activation not in ACTIVATIONS:
            raise ShapeError(f"{self.layer}: activation is {self.activation!r}; known are {', '.join(ACTIVATIONS)}")
        for name in ("hidden_size", "intermediate_size"):
            if getattr(self, name) <= 0 or getattr(self, name) % GROUP:
                raise ShapeError(
                    f"{self.layer}: {name} is {getattr(self, name)}; NVFP4 needs a positive multiple of 16"
                )
        if self.num_experts < 1:
            raise ShapeError(f"{self.layer}: num_experts is {self.num_experts}; need at least 1")

    @property
    def projections(self) -> tuple[str, ...]:
        """The projections that exist: gate and down only, where there is no up."""
        return PROJECTIONS if is_gated(self.activation) else ("gate_proj", "down_proj")

    def shape(self, projection: str) -> tuple[int, int]:
        """[N, K] of a projection's weight, unpacked."""
        if projection == "down_proj":
            return self.hidden_size, self.intermediate_size
        return self.intermediate_size, self.hidden_size


class RawExperts:
    """Slots for one layer's tensors, filled with sentinels, each write recorded.

    A slot that nobody wrote is known by its record, not by its value: memory may hold plausible numbers by accident.
    The buffers have the layout of the checkpoint and are taken over, not copied, by ``finalize``; where its layout will
    be another (sm_90), codes and scales of an expert lie together, so that it can be packed in place.

    Attributes:
        spec: what the layer is. tensors: the buffers by name, until they are taken over.
        sources: (expert, projection, tensor) to the places that wrote it.
        stores: the memory of a projection's codes and scales, where they lie together.
    """

    def __init__(
        self,
        num_experts: int,
        hidden: int,
        intermediate: int,
        *,
        activation: str = "silu",
        bias: bool = False,
        layer: str = "experts",
        device: torch.device | str = "cpu",
    ) -> None:
        """See ``ExpertsSpec``; ``RawExperts.of`` takes a spec with its activation constants."""
        self._allocate(ExpertsSpec(num_experts, hidden, intermediate, activation, bias, layer), torch.device(device))

    @classmethod
    def of(
        cls,
        spec: ExpertsSpec,
        device: torch.device | str = "cpu",
        codes: Callable[[int, str], Tensor] | None = None,
    ) -> RawExperts:
        """Empty slots for a spec.

        With ``codes``, only scales are held: ``check`` calls it as codes(expert, projection) for the packed codes of
        the few experts whose scales raise a question, and ``finalize`` refuses such experts.
        """
        self = cls.__new__(cls)
        self._allocate(spec, torch.device(device), codes)
        return self

    def _allocate(self, spec: ExpertsSpec, device: torch.device, codes=None) -> None:
        self.spec = spec
        self.device = device
        self._codes = codes
        self.sources: dict[tuple[int, str, str], list[str]] = {}
        e, h, i = spec.num_experts, spec.hidden_size, spec.intermediate_size
        parts = len(spec.projections) - 1
        nan = float("nan")

        def filled(shape, value, dtype):
            return torch.full(shape, value, dtype=dtype, device=device)

        self.tensors: dict[str, Tensor] = {
            "w13_global_scale": filled((e, parts), nan, torch.float32),
            "w2_global_scale": filled((e,), nan, torch.float32),
            "a13_scale": filled((e, parts), nan, torch.float32),
            "a2_scale": filled((e,), nan, torch.float32),
        }
        if spec.bias:
            self.tensors["w13_bias"] = filled((e, parts * i), nan, torch.float32)
            self.tensors["w2_bias"] = filled((e, h), nan, torch.float32)
        self.stores: dict[str, Tensor] = {}
        for name, rows, k in (("w13", parts * i, h), ("w2", h, i)):
            if codes is None and not unavailable(device):
                gated = name == "w13" and parts == 2
                self.stores[name], weight, scale = packing.storage(e, rows, k, gated, device)
                self.tensors |= {name: weight.zero_(), f"{name}_block_scale": scale.fill_(NAN_SCALE)}
                continue
            self.tensors[f"{name}_block_scale"] = filled((e, rows, k // GROUP), NAN_SCALE, torch.uint8)
            if codes is None:
                self.tensors[name] = filled((e, rows, k // 2), 0, torch.uint8)

    @property
    def scales_only(self) -> bool:
        """Whether the packed codes stay where they are."""
        return self._codes is not None

    def codes(self, expert: int, projection: str) -> Tensor:
        """Packed codes of one projection, uint8 [N, K/2]."""
        return self.slot(expert, projection, "weight") if self._codes is None else self._codes(expert, projection)

    def note(self, expert: int, projection: str, tensor: str, source: str) -> None:
        """Record that a file holds this tensor, without taking its values (scales only)."""
        self.sources.setdefault((expert, projection, tensor), []).append(source)

    def slot(self, expert: int, projection: str, tensor: str) -> Tensor:
        """The view of the buffers that one checkpoint tensor fills."""
        spec = self.spec
        down = projection == "down_proj"
        name = _BUFFERS.get(tensor, ("", ""))[down]
        known = projection in spec.projections and 0 <= expert < spec.num_experts
        if name not in self.tensors or not known:
            raise ShapeError(f"{spec.layer}, expert {expert}, {projection}.{tensor}: {self._no_slot(expert, tensor)}")
        part = 1 if projection == "up_proj" else 0
        view = self.tensors[name][expert]
        if down:
            return view
        if tensor in ("weight_scale_2", "input_scale"):
            return view[part]
        rows = spec.intermediate_size
        return view[part * rows : (part + 1) * rows]

    def _no_slot(self, expert: int, tensor: str) -> str:
        """Why a slot does not exist."""
        if not self.tensors:
            return "these experts were finalized already; make new RawExperts to load again"
        if not 0 <= expert < self.spec.num_experts:
            return f"this layer has {self.spec.num_experts} experts; ids start at 0 on every rank"
        if tensor == "bias":
            return "this layer was declared without biases"
        if tensor == "weight" and self.scales_only:
            return "only scales are held here; make RawExperts without codes= to load weights"
        return f"no such slot; projections {self.spec.projections}, tensors {TENSORS}"

    def load(self, expert: int, projection: str, tensor: str, value: Tensor, source: str = "?") -> None:
        """Write one checkpoint tensor.

        Args:
            expert: local expert. projection: one of PROJECTIONS. tensor: one of TENSORS.
            value: codes uint8 [N, K/2]; block scales float8_e4m3fn (or the same bytes as uint8) [N, K/16]; global
                scales float32 () or (1), decode convention; bias [N].
            source: "file:key", for messages.

        Raises:
            ShapeError: wrong slot, shape or dtype; nothing is converted to fit.
        """
        target = self.slot(expert, projection, tensor)
        if tensor == "weight_scale":
            value = as_bytes(value)
        if tensor == "bias":
            value = value.to(torch.float32)
        if target.dim() == 0 and value.numel() == 1:
            value = value.reshape(())
        if value.shape != target.shape or value.dtype != target.dtype:
            raise ShapeError(
                f"{self.spec.layer}, expert {expert}, {projection}.{tensor} (from {source}): "
                f"got {value.dtype} {tuple(value.shape)}, need {target.dtype} {tuple(target.shape)}; "
                "values are viewed, never converted"
            )
        target.copy_(value)
        self.sources.setdefault((expert, projection, tensor), []).append(source)

    def release(self) -> dict[str, Tensor]:
        """Give the buffers away; this object is empty afterwards."""
        tensors, self.tensors = self.tensors, {}
        return tensors
