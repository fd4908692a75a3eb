"""A checkpoint folder: its configuration, its quantisation, and where each tensor lies. Nothing here builds a model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from .errors import CheckpointError, MachineError

INDEX = "model.safetensors.index.json"
_EXPERT_KEY = re.compile(
    r"^(?P<layer>.+\.experts)\.(?P<expert>\d+)\.(?P<projection>gate_proj|up_proj|down_proj|w1|w2|w3)"
    r"\.(?P<tensor>weight|weight_scale|weight_scale_2|input_scale|bias)$"
)
_PROJECTIONS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
ALGORITHMS = ("NVFP4", "W4A16_NVFP4")


@dataclass(frozen=True)
class ExpertKey:
    """What one per-expert key names, in canonical words."""

    layer: str
    expert: int
    projection: str
    tensor: str

    @classmethod
    def parse(cls, key: str) -> ExpertKey | None:
        """None for keys that belong to no expert."""
        match = _EXPERT_KEY.match(key)
        if match is None:
            return None
        projection = match["projection"]
        return cls(match["layer"], int(match["expert"]), _PROJECTIONS.get(projection, projection), match["tensor"])


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint folder.

    Attributes:
        path: the folder. config: config.json. algorithm: ModelOpt's quant_algo. shards: file to its keys, in order.
    """

    path: Path
    config: dict
    algorithm: str
    shards: dict[Path, tuple[str, ...]]

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """Read configuration and headers; tensors stay on disk.

        Raises:
            CheckpointError: not a folder, not a checkpoint, not quantised in a way known here, broken files.
            MachineError: a hub id, and huggingface_hub is missing.
        """
        folder = _resolve(path)
        config = _read_json(folder / "config.json", "a checkpoint folder holds config.json and *.safetensors")
        return cls(folder, config, _algorithm(folder, config), _shards(folder))

    @property
    def nbytes(self) -> int:
        """Bytes of all shards."""
        return sum(p.stat().st_size for p in self.shards)

    def tensors(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield "file:key", key and tensor, shard by shard through a memory map, one tensor at a time."""
        for shard, keys in self.shards.items():
            with _open_shard(shard) as file:
                for key in keys:
                    yield f"{shard.name}:{key}", key, file.get_tensor(key)


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


def _read_json(path: Path, needed: str) -> dict:
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; {needed}") from None
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} holds {type(data).__name__}, not an object")
    return data


def _algorithm(folder: Path, config: dict) -> str:
    quantization = config.get("quantization_config")
    if not quantization and (folder / "hf_quant_config.json").exists():
        quantization = _read_json(folder / "hf_quant_config.json", "").get("quantization")
    if not isinstance(quantization, dict):
        raise CheckpointError(
            f"{folder} is not quantised: config.json has no quantization_config; this loads NVFP4 checkpoints "
            f"(quant_algo {' or '.join(ALGORITHMS)})"
        )
    algorithm = quantization.get("quant_algo")
    if algorithm not in ALGORITHMS:
        method = quantization.get("quant_method", "?")
        raise CheckpointError(
            f"{folder} is quantised with quant_method {method!r}, quant_algo {algorithm!r}; this loads quant_method "
            f"'modelopt' with quant_algo {' or '.join(ALGORITHMS)}"
        )
    return algorithm


def _shards(folder: Path) -> dict[Path, tuple[str, ...]]:
    index = folder / INDEX
    if not index.exists():
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise CheckpointError(f"{folder} holds no *.safetensors file")
        return {file: _keys(file) for file in files}
    weight_map = _read_json(index, "").get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError(f"{index} has no weight_map from key to file name")
    shards: dict[Path, tuple[str, ...]] = {}
    for name in sorted(set(weight_map.values())):
        if Path(name).name != name:
            raise CheckpointError(f"{index} points to {name!r}, outside its own folder; shards are plain file names")
        listed = {key for key, file in weight_map.items() if file == name}
        found = _keys(folder / name)
        absent, extra = listed - set(found), set(found) - listed
        if absent or extra:
            raise CheckpointError(
                f"{folder / name} and its index disagree: {len(absent)} keys only in the index, {len(extra)} only in "
                f"the file, such as {min(absent | extra)}"
            )
        shards[folder / name] = found
    return shards


def _open_shard(path: Path):
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from error


def _keys(path: Path) -> tuple[str, ...]:
    with _open_shard(path) as file:
        return tuple(file.keys())
