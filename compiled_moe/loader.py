"""From a checkpoint folder to a transformers model whose experts run on our operator.

Experts are loaded into canonical slots with provenance and finalized layer by layer, as soon as a layer is complete;
what is not an expert goes where transformers' own module has that name. Every key must be consumed, every slot filled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nvfp4 import ExpertsSpec, ExpertWeights, RawExperts, ScaleError, ScaleReport, finalize

from .checkpoint import Checkpoint, ExpertKey
from .errors import CheckpointError, MachineError
from .experts import NVFP4Experts

DEMO = Path(__file__).parent / "data" / "demo"
"""The shipped model."""
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
_UNUSED_SUFFIXES = (".k_scale", ".v_scale", ".rotary_emb.inv_freq")


@dataclass
class Loaded:
    """What ``load`` found, kept on the model as ``model.nvfp4``."""

    checkpoint: Checkpoint
    precision: str
    report: ScaleReport
    weights: dict[str, ExpertWeights] = field(default_factory=dict)

    @property
    def expert_bytes(self) -> int:
        """Bytes of all experts, scales included."""
        return sum(w.nbytes for w in self.weights.values())

    @property
    def expert_parameters(self) -> int:
        """Weights of all experts, each counted once."""
        return sum(2 * (w.tensors["w13"].numel() + w.tensors["w2"].numel()) for w in self.weights.values())


def load(
    path: str | Path = DEMO,
    *,
    precision: str = "w4a16",
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    policy: str = "raise",
    repairs: tuple[str, ...] = (),
    progress: Callable[[int, int], None] | None = None,
) -> Any:
    """Load an NVFP4 mixture-of-experts checkpoint.

    Args:
        path: folder or hub id; the shipped model by default.
        precision, policy, repairs: see ``nvfp4.finalize``.
        device: default cuda where there is one.
        dtype: of everything but the experts; default the checkpoint's on a GPU, float32 on a CPU (bfloat16 is
            emulated on most).
        progress: called with bytes done and bytes in all.

    Returns:
        A transformers model in eval mode; ``model.nvfp4`` is a ``Loaded``.

    Raises:
        CheckpointError, MachineError, nvfp4.ScaleError.
    """
    checkpoint = Checkpoint.open(path)
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise MachineError("no CUDA device is visible to PyTorch here; leave --device out, or give cpu")
    model = _empty_model(checkpoint, dtype or (torch.float32 if device.type == "cpu" else None))
    loaded = Loaded(checkpoint, precision, ScaleReport(precision))
    filler = _Filler(model, loaded, device, (precision, "report" if policy == "raise" else policy, repairs))
    filler.run(progress)
    if policy == "raise" and not loaded.report.ok:
        raise ScaleError(loaded.report)
    model.nvfp4 = loaded
    return model.eval().requires_grad_(False)


def _empty_model(checkpoint: Checkpoint, dtype: torch.dtype | None) -> Any:
    """The model of config.json on the meta device, real buffers where the checkpoint brings none."""
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise MachineError("loading models needs transformers: pip install 'compiled-moe[hf]'") from error
    try:
        config = AutoConfig.from_pretrained(checkpoint.path)
        config.quantization_config = None
        del config.quantization_config
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, **({} if dtype is None else {"dtype": dtype}))
    except (ValueError, KeyError, OSError) as error:
        raise CheckpointError(
            f"transformers cannot build the model of {checkpoint.path}/config.json: {error}"
        ) from error
    for name, module in list(model.named_modules()):
        if any(b.is_meta for b in module._buffers.values() if b is not None) and not list(module.parameters()):
            model.set_submodule(name, type(module)(config))  # rotary embeddings: computed, never stored
    return model


class _Filler:
    """Moves tensors to their places and keeps account."""

    def __init__(self, model: Any, loaded: Loaded, device: torch.device, rules: tuple) -> None:
        self.model, self.loaded, self.device, self.rules = model, loaded, device, rules
        self.raw: dict[str, RawExperts] = {}
        self.waiting: dict[str, int] = {}
        self.slots = dict(model.named_parameters()) | dict(model.named_buffers())
        self.unknown: list[str] = []
        self.filled: set[str] = set()
        for key in (key for keys in loaded.checkpoint.shards.values() for key in keys):
            if (parsed := ExpertKey.parse(key)) is not None:
                layer = self._module_name(parsed.layer)
                self.waiting[layer] = self.waiting.get(layer, 0) + 1
        if not self.waiting:
            raise CheckpointError(
                f"{loaded.checkpoint.path} holds no per-expert NVFP4 tensors (...experts.0.gate_proj.weight)"
            )

    def run(self, progress: Callable[[int, int], None] | None) -> None:
        """All tensors, then the account."""
        done, total = 0, self.loaded.checkpoint.nbytes
        for source, key, tensor in self.loaded.checkpoint.tensors():
            parsed = ExpertKey.parse(key)
            if parsed is not None:
                self._expert(parsed, tensor, source)
            else:
                self._plain(key, tensor, source)
            done += tensor.numel() * tensor.element_size()
            if progress is not None:
                progress(min(done, total), total)
        if self.unknown:
            raise CheckpointError(f"{len(self.unknown)} keys have no place in the model: {_some(self.unknown)}")
        self.model.tie_weights()
        empty = [n for n, t in [*self.model.named_parameters(), *self.model.named_buffers()] if t.is_meta]
        if empty:
            raise CheckpointError(f"{len(empty)} tensors of the model are in no file: {_some(empty)}")
        self.model.to(self.device)

    def _module_name(self, name: str) -> str:
        """Checkpoints name modules with or without the leading "model."."""
        modules = {n for n, _ in self.model.named_modules()}
        for candidate in (name, f"model.{name}", name.removeprefix("model.")):
            if candidate in modules:
                return candidate
        raise CheckpointError(f"{name} is no module of {type(self.model).__name__}")

    def _expert(self, key: ExpertKey, tensor: Tensor, source: str) -> None:
        layer = self._module_name(key.layer)
        if layer not in self.raw:
            self.raw[layer] = RawExperts.of(self._spec(layer), self.device)
        self.raw[layer].load(key.expert, key.projection, key.tensor, tensor, source)
        self.waiting[layer] -= 1
        if self.waiting[layer] == 0:
            weights, report = finalize(self.raw.pop(layer), *self.rules)
            self.loaded.report.merge(report)
            self.loaded.weights[layer] = weights
            self.model.set_submodule(layer, NVFP4Experts(weights))

    def _spec(self, layer: str) -> ExpertsSpec:
        module: Any = self.model.get_submodule(layer)
        config = self.model.config
        down = getattr(module, "down_proj", None)
        activation = _ACTIVATIONS.get(getattr(config, "hidden_act", ""))
        if not isinstance(down, Tensor) or down.dim() != 3 or activation is None or hasattr(module, "down_proj_bias"):
            raise CheckpointError(
                f"{layer} is {type(module).__name__}, activation {getattr(config, 'hidden_act', None)!r}; known are "
                f"gated experts with one down_proj [experts, hidden, intermediate] and {', '.join(_ACTIVATIONS)}"
            )
        experts, hidden, intermediate = down.shape
        return ExpertsSpec(experts, hidden, intermediate, activation, layer=layer)

    def _plain(self, key: str, tensor: Tensor, source: str) -> None:
        name = next((n for n in (key, f"model.{key}", key.removeprefix("model.")) if n in self.slots), None)
        if name is None:
            if not key.endswith(_UNUSED_SUFFIXES):
                self.unknown.append(source)
            return
        slot = self.slots[name]
        if name in self.filled:
            raise CheckpointError(f"{source}: {name} was filled before; the checkpoint holds it twice")
        if tensor.shape != slot.shape or not tensor.is_floating_point() or tensor.element_size() == 1:
            raise CheckpointError(
                f"{source} is {tensor.dtype} {tuple(tensor.shape)}, but {name} needs a floating {tuple(slot.shape)}; "
                "NVFP4 is known for experts, not yet for this layer"
            )
        self.filled.add(name)
        owner, _, leaf = name.rpartition(".")
        module = self.model.get_submodule(owner)
        value = tensor.to(self.device, slot.dtype)
        if isinstance(slot, nn.Parameter):
            setattr(module, leaf, nn.Parameter(value, requires_grad=False))
        else:
            setattr(module, leaf, value)


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
