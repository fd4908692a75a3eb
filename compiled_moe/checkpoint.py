"""A checkpoint folder: its configuration, its quantisation, and where each tensor lies. Nothing here builds a model."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from .dense import DenseLayer, dense_layers
from .errors import CheckpointError, MachineError
from .layers import Layer, expert_layers
from .quantization import Quantization
from .shards import Header, read_headers, read_json


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint folder.

    Attributes:
        path: the folder. config: config.json. quantization: what the configuration claims.
        headers: every key of every shard, in order. layers: the quantised experts. dense: other NVFP4 layers.
    """

    path: Path
    config: dict
    quantization: Quantization
    headers: dict[str, Header]
    layers: tuple[Layer, ...]
    dense: tuple[DenseLayer, ...]

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """Read configuration and headers; tensors stay on disk.

        Raises:
            CheckpointError: not a folder, not a checkpoint, not quantised in a way known here, broken files.
            MachineError: a hub id, and huggingface_hub is missing.
        """
        folder = _resolve(path)
        config = read_json(folder / "config.json", "a checkpoint folder holds config.json and *.safetensors")
        separate = folder / "hf_quant_config.json"
        quantization = Quantization.read(config, read_json(separate) if separate.exists() else None, str(folder))
        headers = read_headers(folder)
        layers = expert_layers(headers, str(config.get("model_type", "")))
        consumed = {part.header.key for layer in layers for part in layer.parts}
        dense = dense_layers({key: header for key, header in headers.items() if key not in consumed})
        return cls(folder, config, quantization, headers, tuple(layers), tuple(dense))

    @property
    def files(self) -> tuple[Path, ...]:
        """The shards, in order."""
        return tuple(Path(file) for file in dict.fromkeys(header.file for header in self.headers.values()))

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(header.nbytes for header in self.headers.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all shards."""
        return sum(file.stat().st_size for file in self.files)


def _resolve(path: str | Path) -> Path:
    folder = Path(path)
    if folder.is_dir():
        return folder
    if folder.exists():
        raise CheckpointError(f"{path} is a file; give the folder that holds config.json and *.safetensors")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)):
        raise CheckpointError(f"{path} does not exist; give a checkpoint folder, or a hub id such as org/name")
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise MachineError(f"{path} is no local folder, and hub ids need: pip install 'compiled-moe[hf]'") from error
    try:
        return Path(snapshot_download(str(path), allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model"]))
    except Exception as error:  # the hub client raises many kinds; each means that the checkpoint cannot be had
        raise CheckpointError(f"{path} is no local folder, and the hub did not give it: {error}") from error
