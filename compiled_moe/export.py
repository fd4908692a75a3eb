"""From the files of an unquantised model to NVFP4 experts in ModelOpt's layout: matrix by matrix, nothing else changed.

One expert and one shard that is being written are in memory, whatever the size of the model.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nvfp4 import quantize
from nvfp4.format import GROUP, scale_of_amax

from .errors import CheckpointError
from .names import ExpertKey
from .parts import Part
from .shards import Header, Reader, read_headers, read_json
from .writing import ShardWriter, modelopt_config

_FLOATS = ("BF16", "F16", "F32")
Amax = Callable[[str, str], Tensor]
"""(layer, projection) to the input magnitudes of its experts, [experts], negative where there shall be no scale."""


@dataclass(frozen=True)
class Matrix:
    """One projection of one expert: where its weight lies, its layer, and the name it will have."""

    part: Part
    layer: str
    name: str

    def read(self, reader: Reader, device: torch.device | str) -> Tensor:
        """Float32 [N, K]."""
        ((_, value),) = self.part.read(reader)
        return value.to(device, torch.float32).contiguous()


@dataclass(frozen=True)
class Plan:
    """What will become of every key of an unquantised checkpoint; made from headers alone.

    Attributes:
        path: the folder. config: config.json. headers: every key, in the order of the files.
        matrices: key to what it holds of experts, one or, in a tensor of all experts, many.
    """

    path: Path
    config: dict
    headers: dict[str, Header]
    matrices: dict[str, list[Matrix]]

    @classmethod
    def read(cls, path: Path) -> Plan:
        """Look at the headers.

        Raises:
            CheckpointError: no experts, experts in a layout that is not known here, sizes that NVFP4 cannot hold.
        """
        config = read_json(path / "config.json", "a checkpoint folder holds config.json and *.safetensors")
        headers = read_headers(path)
        parsed = {key: ExpertKey.parse(key) for key in headers}
        matrices = {key: _matrices(name, key, headers) for key, name in parsed.items() if name is not None}
        if not matrices:
            raise CheckpointError(f"{path} holds no experts, such as ...experts.0.gate_proj.weight")
        return cls(path, config, headers, matrices)

    @property
    def layers(self) -> list[str]:
        """Experts modules, as the files call them."""
        return list(dict.fromkeys(m.layer for many in self.matrices.values() for m in many))

    @property
    def left_alone(self) -> list[str]:
        """Globs of the modules whose weight matrix stays as it is, layer numbers as ``*``."""
        names = {
            re.sub(r"\.[0-9]+\.", ".*.", key.removesuffix(".weight"))
            for key, header in self.headers.items()
            if key.endswith(".weight") and len(header.shape) == 2 and key not in self.matrices
        }
        return sorted(names)

    def write(
        self,
        writer: ShardWriter,
        amax: Amax | None = None,
        device: torch.device | str = "cpu",
        progress: Callable[[int, int], None] | None = None,
    ) -> Path:
        """Write the checkpoint, in the order of the source's files.

        Gate and up get one weight_scale_2, from the larger maximum: engines that apply one to both are right then.

        Args:
            writer: of an empty folder. amax: input magnitudes; None is a weight-only checkpoint.
            device: where the arithmetic is done. progress: called with bytes done and bytes in all, of the source.

        Returns:
            The folder.

        Raises:
            CheckpointError: weights that are not finite, a gate without its up, files that cannot be read or written.
        """
        reader, done, total = Reader(), 0, sum(h.nbytes for h in self.headers.values())
        scales = _WeightScales(self, reader, device)
        for key, header in self.headers.items():
            for matrix in self.matrices.get(key, ()):
                for name, value in _quantised(matrix, reader, scales.of(matrix), amax, device):
                    writer.add(name, value)
            if key not in self.matrices:
                writer.add(key, reader.get(header))
            done += header.nbytes
            if progress is not None:
                progress(done, total)
        writer.close(modelopt_config(self.config, self.left_alone, amax is None))
        return writer.folder


class _WeightScales:
    """weight_scale_2 of every matrix; what gate and up share is kept until both have been written."""

    def __init__(self, plan: Plan, reader: Reader, device: torch.device | str) -> None:
        self.reader, self.device = reader, device
        self.known: dict[tuple[str, int, str], Matrix] = {
            (m.layer, m.part.expert, m.part.projection): m for many in plan.matrices.values() for m in many
        }
        self.shared: dict[tuple[str, int], Tensor] = {}

    def of(self, matrix: Matrix) -> Tensor:
        """Float32 ()."""
        e, projection = matrix.part.expert, matrix.part.projection
        gated = (matrix.layer, e, "gate_proj") in self.known
        if projection == "down_proj" or not gated:
            return self._amax(matrix)
        if (matrix.layer, e) in self.shared:
            return self.shared.pop((matrix.layer, e))
        other = self.known.get((matrix.layer, e, "up_proj" if projection == "gate_proj" else "gate_proj"))
        if other is None:
            raise CheckpointError(f"{matrix.part.source}: expert {e} has a gate_proj, but no up_proj is in the files")
        scale = torch.maximum(self._amax(matrix), self._amax(other))
        self.shared[matrix.layer, e] = scale
        return scale

    def _amax(self, matrix: Matrix) -> Tensor:
        amax = matrix.read(self.reader, self.device).abs().amax()
        if not torch.isfinite(amax):
            raise CheckpointError(
                f"{matrix.part.source}: {matrix.name} holds NaN or infinity; mend the model before it is quantised"
            )
        return scale_of_amax(amax)


def _quantised(matrix: Matrix, reader: Reader, scale: Tensor, amax: Amax | None, device) -> list[tuple[str, Tensor]]:
    """ModelOpt's tensors of one matrix.

    An expert that calibration never reached gets no input_scale unless the policy gives one: a number made up here
    could not be told from a measured one later.
    """
    codes, block_scale = quantize(matrix.read(reader, device), scale)
    tensors = [
        (f"{matrix.name}.weight", codes),
        (f"{matrix.name}.weight_scale", block_scale.view(torch.float8_e4m3fn)),
        (f"{matrix.name}.weight_scale_2", scale),
    ]
    seen = -1.0 if amax is None else float(amax(matrix.layer, matrix.part.projection)[matrix.part.expert])
    if seen >= 0:
        tensors.append((f"{matrix.name}.input_scale", scale_of_amax(torch.tensor(seen))))
    return tensors


def _matrices(name: ExpertKey, key: str, headers: dict[str, Header]) -> list[Matrix]:
    """What one key of experts holds."""
    header = headers[key]
    if name.tensor != "weight" or name.blocks:
        raise CheckpointError(
            f"{header.source} is {'a bias' if name.tensor == 'bias' else 'part of quantised weights'}; this quantises "
            "experts of plain weights without bias"
        )
    if header.dtype not in _FLOATS:
        raise CheckpointError(f"{header.source} is {header.dtype}; need weights in {', '.join(_FLOATS)}")
    if not header.shape or header.shape[-1] % GROUP or not all(header.shape):
        raise CheckpointError(
            f"{header.source} is {header.shape}; the last size must be a positive multiple of {GROUP}"
        )
    if name.expert is not None:
        if len(header.shape) != 2:
            raise CheckpointError(f"{header.source} is {header.shape}; the weight of one expert has two sizes")
        part = Part(name.expert, name.projection, "weight", header)
        return [Matrix(part, name.layer, key.removesuffix(".weight"))]
    return [
        Matrix(Part(e, projection, "weight", header, row=e, cut=cut), name.layer, f"{name.layer}.{e}.{projection}")
        for e in range(header.shape[0])
        for projection, cut in _halves(name, header, headers)
    ]


def _halves(name: ExpertKey, header: Header, headers: dict[str, Header]) -> list[tuple[str, slice | None]]:
    """The projections in a tensor of all experts, and their rows; both tensors together tell the layout."""
    into = headers.get(f"{name.layer}.gate_up_proj") or headers.get(f"{name.layer}.up_proj")
    down = headers.get(f"{name.layer}.down_proj")
    rows = 2 if into is not None and into.key.endswith("gate_up_proj") else 1
    a, b = (h.shape if h is not None else () for h in (into, down))
    if not (len(a) == len(b) == 3 and a[0] == b[0] and a[1] == rows * b[2] and a[2] == b[1]):
        raise CheckpointError(
            f"{header.source}: {a} into the experts and {b} out of them; this quantises [experts, "
            f"{'2 ' if rows == 2 else ''}intermediate, hidden] with [experts, hidden, intermediate], not transposed"
        )
    if name.projection != "gate_up_proj":
        return [(name.projection, None)]
    return [("gate_proj", slice(0, b[2])), ("up_proj", slice(b[2], None))]
