"""From the tensors of a file to canonical slots: which rows of which key, and what must be viewed, turned or inverted.

Values are viewed, sliced and transposed; the only arithmetic is the reciprocal of a scale that a file stores as encode
factor, and the exact conversion of MXFP4 scales.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nvfp4 import NVFP4Error, from_mxfp4

from .errors import CheckpointError
from .names import MX_SCALE
from .shards import Header, Reader

SCALARS = ("weight_scale_2", "input_scale")
DTYPES = {
    "weight": ("U8", "I8"),
    "weight_scale": ("F8_E4M3", "U8"),
    "weight_scale_2": ("F32",),
    "input_scale": ("F32",),
    MX_SCALE: ("U8", "F8_E8M0"),
    "bias": ("F32", "BF16", "F16"),
}
"""What a file may hold for each canonical tensor."""


@dataclass(frozen=True)
class Part:
    """One key, or what one expert has in it, and the slots of one projection that it fills.

    Attributes:
        expert, projection: whose. tensor: canonical name; MX_SCALE fills weight_scale and weight_scale_2.
        header: where it lies. encode: the file stores 2688/amax.
        row: the expert's index in a tensor of all experts. turned: stored [in, out].
        cut: rows of a tensor that holds gate and up.
        codes: for MX_SCALE, the part with the packed codes.
    """

    expert: int
    projection: str
    tensor: str
    header: Header
    encode: bool = False
    row: int | None = None
    turned: bool = False
    cut: slice | None = None
    codes: Part | None = None

    @property
    def source(self) -> str:
        """Written file:key, and what is not as it lies there."""
        return self.header.source + (" (stored as 2688/amax)" if self.encode else "")

    def read(self, reader: Reader, scales_only: bool = False) -> list[tuple[str, Tensor]]:
        """Canonical names and values.

        Args:
            reader: the checkpoint's. scales_only: look at codes only where the scales alone leave a question.

        Raises:
            CheckpointError: unreadable, or MXFP4 scales that do not convert without loss.
        """
        value = self._cut(reader)
        if self.tensor != MX_SCALE:
            return [(self.tensor, 1 / value if self.encode else value)]
        codes = None if scales_only or self.codes is None else self.codes._cut(reader)
        try:
            scales = self._converted(value, codes)
        except NVFP4Error:
            if codes is not None or self.codes is None:
                raise
            scales = self._converted(value, self.codes._cut(reader))
        return [("weight_scale", scales[0]), ("weight_scale_2", scales[1])]

    def _converted(self, scale: Tensor, codes: Tensor | None) -> tuple[Tensor, Tensor]:
        try:
            return from_mxfp4(scale.contiguous(), None if codes is None else codes.contiguous())
        except NVFP4Error as error:
            raise NVFP4Error(f"{self.source}, expert {self.expert}, {self.projection}: {error}") from error

    def _cut(self, reader: Reader) -> Tensor:
        value = self._whole(reader)
        if self.tensor in SCALARS:
            return value
        if self.tensor == "weight" and value.dim() == 3:  # MXFP4 blocks [rows, K/32, 16]
            value = value.flatten(1)
        if self.turned:
            value = value.T
        return value if self.cut is None else value[self.cut]

    def _whole(self, reader: Reader) -> Tensor:
        shape = self.header.shape
        if self.tensor in SCALARS and torch.Size(shape).numel() == 1:
            return reader.get(self.header).reshape(())
        value = reader.get(self.header) if self.row is None else reader.row(self.header, self.row)
        if self.tensor in SCALARS:
            return value.reshape(())
        if self.tensor in ("weight", MX_SCALE) and value.element_size() == 1 and value.dtype != torch.uint8:
            value = value.view(torch.uint8)
        return value


def codes_reader(parts: dict[tuple[int, str], Part], reader: Reader) -> Callable[[int, str], Tensor]:
    """The packed codes of (expert, projection), read when asked for."""

    def codes(expert: int, projection: str) -> Tensor:
        ((_, value),) = parts[expert, projection].read(reader)
        return value

    return codes


def need(condition: bool, header: Header, found: str, needed: str) -> None:
    """Raise the sentence about a header unless ``condition``."""
    if not condition:
        raise CheckpointError(f"{header.source} is {found}; need {needed} (values are viewed, never converted)")
