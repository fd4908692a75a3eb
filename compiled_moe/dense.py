"""Dense NVFP4 layers of a checkpoint: found by their tensors, checked like experts, served by ``nvfp4.linear``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nvfp4 import LinearWeights, RawLinear

from .names import SUFFIXES, ExpertKey
from .parts import DTYPES, need
from .shards import Header, Reader


@dataclass(frozen=True)
class DenseLayer:
    """One quantised linear layer on disk: its tensors by canonical name, and which of them are encode factors."""

    name: str
    tensors: dict[str, tuple[Header, ...]]
    encoded: frozenset[str]

    @property
    def keys(self) -> set[str]:
        """The files' keys that this layer consumes."""
        return {header.key for headers in self.tensors.values() for header in headers}

    def read(self, reader: Reader, device: torch.device | str = "cpu", scales_only: bool = False) -> RawLinear:
        """Load it; with ``scales_only`` the codes and the bias are noted, not read.

        Raises:
            CheckpointError, nvfp4.ShapeError: names the key.
        """
        rows, packed = self.tensors["weight"][0].shape
        raw = RawLinear(self.name, rows, 2 * packed, device)
        for tensor, headers in self.tensors.items():
            for header in headers:
                if scales_only and tensor in ("weight", "bias"):
                    raw.note(tensor, header.source)
                    continue
                value = reader.get(header)
                raw.load(tensor, 1 / value if header.key in self.encoded else value, header.source)
        return raw


def dense_layers(headers: dict[str, Header]) -> list[DenseLayer]:
    """Every module outside experts with packed 4-bit codes and block scales.

    Raises:
        CheckpointError: a dtype or shape that cannot be; names the key.
    """
    found: dict[str, dict[str, tuple[Header, ...]]] = {}
    encoded: set[str] = set()
    for key, header in headers.items():
        module, _, suffix = key.rpartition(".")
        tensor, encode = SUFFIXES.get(suffix, ("", False))
        if tensor not in DTYPES or tensor == "mx_scale" or ExpertKey.parse(key) is not None:
            continue
        mine = found.setdefault(module, {})
        mine[tensor] = (*mine.get(tensor, ()), header)
        if encode:
            encoded.add(key)
    layers = []
    for module, tensors in found.items():
        if "weight_scale" not in tensors or not any(h.dtype == "U8" for h in tensors.get("weight", ())):
            continue
        for tensor, held in tensors.items():
            for header in held:
                allowed = DTYPES[tensor]
                need(header.dtype in allowed, header, header.dtype, " or ".join(allowed))
                if tensor in ("weight", "weight_scale"):
                    need(len(header.shape) == 2, header, str(header.shape), "two sizes")
        mine_encoded = frozenset(h.key for held in tensors.values() for h in held) & encoded
        layers.append(DenseLayer(module, tensors, mine_encoded))
    return layers


class NVFP4Linear(nn.Module):
    """A linear layer on ``torch.ops.nvfp4.linear``; takes the place of ``nn.Linear``."""

    def __init__(self, weights: LinearWeights) -> None:
        """Take finalized weights."""
        super().__init__()
        self.precision = weights.precision
        self.codes: Tensor
        self.block_scale: Tensor
        self.global_scale: Tensor
        self.a_scale: Tensor | None
        self.bias: Tensor | None
        for name in ("codes", "block_scale", "global_scale", "a_scale", "bias"):
            self.register_buffer(name, getattr(weights, name), persistent=False)

    @property
    def in_features(self) -> int:
        """K."""
        return 2 * self.codes.shape[1]

    @property
    def out_features(self) -> int:
        """N."""
        return self.codes.shape[0]

    def _apply(self, fn, recurse=True):
        """Follow ``.to(device)``, leaving every dtype as it is: scales are not activations."""

        def move(t: Tensor) -> Tensor:
            return t.to(fn(t).device)

        return super()._apply(move, recurse)

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] to [..., N] in x's dtype."""
        rows = x.reshape(-1, x.shape[-1])
        out = torch.ops.nvfp4.linear(
            rows, self.codes, self.block_scale, self.global_scale, self.a_scale, self.bias, precision=self.precision
        )
        return out.reshape(*x.shape[:-1], out.shape[1])

    def extra_repr(self) -> str:
        """One line for print(model)."""
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.precision}"
