"""Moving a checkpoint into a model, with an account: every key consumed, every slot filled, nothing converted.

Experts go layer by layer into canonical slots and are finalized there, so that beside the model one expert at a time
is in flight; what is not quantised goes where transformers' own module has that name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from nvfp4 import ExpertWeights, NVFP4Error, RawExperts, ScaleReport, finalize, finalize_linear

from .checkpoint import Checkpoint
from .dense import DenseLayer, NVFP4Linear
from .errors import CheckpointError
from .experts import NVFP4Experts
from .layers import Layer
from .on_input import WeightOnInput, weighs_input
from .places import Places, experts_spec
from .shards import Header, Reader

UNUSED_SUFFIXES = (".k_scale", ".v_scale", ".rotary_emb.inv_freq")
Progress = Callable[[int, int], None]


class Filler:
    """Moves tensors to their places and keeps account.

    Attributes:
        report: what finalize found. weights: experts by the model's module names.
    """

    def __init__(
        self,
        model: Any,
        checkpoint: Checkpoint,
        device: torch.device,
        rules: tuple[str, str, tuple],
        device_of: Callable[[str], torch.device] | None = None,
    ) -> None:
        """Take ``rules`` as (precision, policy, repairs) of ``nvfp4.finalize``; ``device_of`` where modules differ."""
        self.model, self.checkpoint, self.device, self.rules = model, checkpoint, device, rules
        self.device_of = device_of or (lambda name: device)
        self.report = ScaleReport(rules[0])
        self.weights: dict[str, ExpertWeights] = {}
        self.places = Places(model)
        self.reader = Reader()
        self.filled: dict[str, str] = {}
        self._done, self._total = 0, checkpoint.tensor_bytes

    def run(self, progress: Progress | None = None) -> None:
        """Everything, then the account.

        Raises:
            CheckpointError, nvfp4.ShapeError: names the file and the key.
        """
        if not self.checkpoint.layers:
            raise CheckpointError(
                f"{self.checkpoint.path} holds no NVFP4 experts, such as ...experts.0.gate_proj.weight_scale"
            )
        consumed = self.quantised(progress)
        unknown = []
        for key, header in self.checkpoint.headers.items():
            unused = key in consumed or key.endswith(UNUSED_SUFFIXES) or self.places.ignored(key)
            if not unused and not self._plain(header, progress):
                unknown.append(header.source)
        self.reader.close()
        if unknown:
            raise CheckpointError(f"{len(unknown)} keys have no place in the model: {_some(unknown)}")
        self.model.tie_weights()
        empty = [n for n, t in [*self.model.named_parameters(), *self.model.named_buffers()] if t.is_meta]
        if empty:
            raise CheckpointError(f"{len(empty)} tensors of the model are in no file: {_some(empty)}")
        self.model.to(self.device)
        self._count(self._total, progress)

    def quantised(self, progress: Progress | None = None) -> set[str]:
        """Experts and dense NVFP4 layers only: read, checked, finalized and put in their places.

        Returns:
            The keys that they consumed.
        """
        consumed: set[str] = set()
        for layer in self.checkpoint.layers:
            if not self.places.ignored(f"{layer.name}."):
                self._experts(layer, progress)
            consumed |= {part.header.key for part in layer.parts}
        for dense in self.checkpoint.dense:
            if not self.places.ignored(f"{dense.name}."):
                self._dense(dense, progress)
            consumed |= dense.keys
        return consumed

    def _count(self, nbytes: int, progress: Progress | None) -> None:
        self._done = min(self._done + nbytes, self._total)
        if progress is not None:
            progress(self._done, self._total)

    def _experts(self, layer: Layer, progress: Progress | None) -> None:
        name = self.places.module(layer.name)
        if name in self.weights:
            raise CheckpointError(f"{layer.parts[0].source}: {name} was filled before; the checkpoint holds it twice")
        spec = experts_spec(layer.spec, name, self.model.get_submodule(name), self.model.config)
        raw = RawExperts.of(spec, self.device_of(name))
        for part in layer.parts:
            try:
                values = part.read(self.reader)
            except NVFP4Error as error:
                raise CheckpointError(str(error)) from error
            for tensor, value in values:
                raw.load(part.expert, part.projection, tensor, value, part.source)
                self._count(value.numel() * value.element_size(), progress)
        weights, report = finalize(raw, *self.rules)
        self.report.merge(report)
        self.weights[name] = weights
        self.model.set_submodule(name, NVFP4Experts(weights))
        block = self.model.get_submodule(name.rpartition(".")[0])
        if weighs_input(block):
            self.model.set_submodule(name.rpartition(".")[0], WeightOnInput(block))

    def _dense(self, layer: DenseLayer, progress: Progress | None) -> None:
        name = self.places.module(layer.name)
        module = self.model.get_submodule(name)
        (header, *_) = layer.tensors["weight"]
        rows, packed = header.shape
        if not isinstance(module, nn.Linear) or (module.out_features, module.in_features) != (rows, 2 * packed):
            raise CheckpointError(f"{header.source} is [{rows}, {2 * packed}] in NVFP4, but {name} is {module}")
        if self.checkpoint.quantization.ignores(layer.name):
            raise CheckpointError(f"{header.source} is NVFP4, but the configuration's ignore list says it is not")
        if ("bias" in layer.tensors) != (module.bias is not None):
            raise CheckpointError(f"{name}: the bias is in {'the model' if module.bias is not None else 'a file'} only")
        raw = layer.read(self.reader, self.device_of(name))
        weights, report = finalize_linear(raw, *self.rules[:2])
        self.report.merge(report)
        self.model.set_submodule(name, NVFP4Linear(weights))
        self._count(sum(t.numel() * t.element_size() for t in raw.tensors.values()), progress)

    def _plain(self, header: Header, progress: Progress | None) -> bool:
        """Put one tensor where its name is; False where no place has it."""
        name = self.places.slot(header.key)
        if name is None:
            return False
        if name in self.filled:
            raise CheckpointError(f"{header.source}: {name} was filled before, from {self.filled[name]}; one must go")
        slot = self.places.slots[name]
        if header.shape != tuple(slot.shape) or header.dtype not in _ALLOWED[slot.is_floating_point()]:
            raise CheckpointError(
                f"{header.source} is {header.dtype} {header.shape}, but {name} needs {slot.dtype} {tuple(slot.shape)}; "
                "quantised layers are known as NVFP4 only, with weight_scale and weight_scale_2 beside the weight"
            )
        self.filled[name] = header.source
        owner, _, leaf = name.rpartition(".")
        module = self.model.get_submodule(owner)
        tensor = self.reader.get(header)
        value = tensor.to(self.device, slot.dtype, copy=True)  # the map goes away
        setattr(module, leaf, nn.Parameter(value, requires_grad=False) if isinstance(slot, nn.Parameter) else value)
        self._count(tensor.numel() * tensor.element_size(), progress)
        return True


_ALLOWED = {True: ("F64", "F32", "F16", "BF16"), False: ("I64", "I32", "I16", "U8", "BOOL")}
"""What may fill a floating slot (in the model's dtype) and one of integers."""


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
