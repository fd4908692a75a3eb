"""Writing a checkpoint as it is made: one shard in memory, an index at the end, nothing half-written under its name."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from .errors import CheckpointError
from .shards import INDEX

SHARD_BYTES = 4 * 2**30


class ShardWriter:
    """Takes tensors one by one and writes a shard whenever enough have come."""

    def __init__(self, folder: Path, shard_bytes: int = SHARD_BYTES) -> None:
        """Make the folder.

        Raises:
            CheckpointError: it holds a checkpoint already, or cannot be made.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"{folder} cannot be made: {error}") from error
        if any(any(folder.glob(kind)) for kind in ("*.safetensors", "*.part")):
            raise CheckpointError(f"{folder} holds *.safetensors or *.part files already; give an empty folder")
        self.folder, self.shard_bytes = folder, shard_bytes
        self.nbytes = 0
        self._pending: dict[str, Tensor] = {}
        self._size = 0
        self._shards: list[tuple[Path, list[str]]] = []
        self._known: set[str] = set()

    def add(self, key: str, value: Tensor) -> None:
        """Take one tensor; a copy is kept until its shard is written."""
        if key in self._known:
            raise CheckpointError(f"{key} was written twice; the source holds it under two names")
        self._known.add(key)
        size = value.numel() * value.element_size()
        if self._pending and self._size + size > self.shard_bytes:
            self._flush()
        self._pending[key] = value.detach().to("cpu", copy=True).contiguous()
        self._size += size
        self.nbytes += size

    def close(self, config: dict) -> None:
        """Write the last shard, the index where there are several, and config.json last: without it, it is no model."""
        if self._pending:
            self._flush()
        count = len(self._shards)
        weight_map: dict[str, str] = {}
        for i, (part, keys) in enumerate(self._shards):
            name = "model.safetensors" if count == 1 else f"model-{i + 1:05d}-of-{count:05d}.safetensors"
            part.rename(self.folder / name)
            weight_map |= dict.fromkeys(keys, name)
        if count > 1:
            index = {"metadata": {"total_size": self.nbytes}, "weight_map": weight_map}
            (self.folder / INDEX).write_text(json.dumps(index, indent=1) + "\n")
        (self.folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")

    def _flush(self) -> None:
        part = self.folder / f"shard-{len(self._shards):05d}.part"
        try:
            save_file(self._pending, part, {"format": "pt"})
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{part} cannot be written after {self.nbytes / 1e9:.2f} GB: {error}; make room, remove the *.part "
                "files and run again"
            ) from error
        self._shards.append((part, list(self._pending)))
        self._pending, self._size = {}, 0


def modelopt_config(config: dict, ignore: list[str], weight_only: bool) -> dict:
    """config.json of a checkpoint in ModelOpt's layout."""
    quantization = {
        "quant_method": "modelopt",
        "quant_algo": "W4A16_NVFP4" if weight_only else "NVFP4",
        "group_size": 16,
        "ignore": ignore,
        "producer": {"name": "compiled-moe"},
    }
    return config | {"quantization_config": quantization}
