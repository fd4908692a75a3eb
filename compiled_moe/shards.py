"""Safetensors files of a folder: what each key holds, and reading it through a memory map. Nothing is executed."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from .errors import CheckpointError

INDEX = "model.safetensors.index.json"
_SIZES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2}
_AGAIN = "fetch this file again; the others may stay"
_JSON_LIMIT = 256 * 2**20


@dataclass(frozen=True)
class Header:
    """One key of one file: dtype in safetensors' words, such as "U8", and shape."""

    file: str
    key: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def source(self) -> str:
        """Written file:key, for messages."""
        return f"{os.path.basename(self.file)}:{self.key}"

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return math.prod(self.shape) * _SIZES.get(self.dtype, 1)


class Reader:
    """Tensors of a checkpoint; one shard is mapped at a time, so that read pages go with it."""

    def __init__(self) -> None:
        """Nothing is open yet."""
        self._path, self._open = "", None

    def get(self, header: Header) -> Tensor:
        """The whole tensor, a view of the map."""
        try:
            return self._file(header.file).get_tensor(header.key)
        except SafetensorError as error:
            raise CheckpointError(f"{header.source} cannot be read: {error}; {_AGAIN}") from error

    def row(self, header: Header, index: int) -> Tensor:
        """One index of the first size; only its bytes are read."""
        try:
            return self._file(header.file).get_slice(header.key)[index : index + 1][0]
        except SafetensorError as error:
            raise CheckpointError(f"{header.source}[{index}] cannot be read: {error}; {_AGAIN}") from error

    def close(self) -> None:
        """Unmap what is open."""
        self._path, self._open = "", None

    def _file(self, path: str) -> Any:
        if path != self._path:
            self.close()
            self._open = open_shard(path)
            self._path = path
        return self._open


def open_shard(path: Path | str):
    """Map one file; its header is checked against its size.

    Raises:
        CheckpointError: missing, truncated, or no safetensors file.
    """
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read as safetensors: {error}; {_AGAIN}") from error


def read_headers(folder: Path) -> dict[str, Header]:
    """Every key of the folder's shards, in the order of files and keys.

    Raises:
        CheckpointError: no files, a broken one, an index that disagrees or points elsewhere, a key in two files.
    """
    index = folder / INDEX
    files = _from_index(index) if index.exists() else {file: None for file in sorted(folder.glob("*.safetensors"))}
    if not files:
        raise CheckpointError(f"{folder} holds no *.safetensors file")
    headers: dict[str, Header] = {}
    for path, listed in files.items():
        found = _headers(path)
        if listed is not None and listed != found.keys():
            absent, extra = listed - found.keys(), found.keys() - listed
            raise CheckpointError(
                f"{path} and its index disagree: {len(absent)} keys only in the index, {len(extra)} only in the file, "
                f"such as {min(absent | extra)}; fetch both again"
            )
        twice = headers.keys() & found.keys()
        if twice:
            key = min(twice)
            raise CheckpointError(f"{headers[key].source} is in {path.name} too; one of them must go")
        headers |= found
    return headers


def read_json(path: Path, needed: str = "") -> dict:
    """One JSON object from a file.

    Raises:
        CheckpointError: missing (``needed`` says what it is for), too large, or no JSON object.
    """
    try:
        if path.stat().st_size > _JSON_LIMIT:
            raise CheckpointError(f"{path} has {path.stat().st_size} bytes; no configuration needs more than 256 MiB")
        data = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; {needed}") from None
    except (ValueError, OSError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} holds {type(data).__name__}, not an object")
    return data


def _from_index(index: Path) -> dict[Path, set[str] | None]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError(f"{index} has no weight_map from key to file name")
    names: dict[str, set[str]] = {name: set() for name in sorted(set(weight_map.values()))}
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors") or not name.isprintable():
            raise CheckpointError(
                f"{index} points to {name!r}, outside its own folder or no shard; shards are plain names that end in "
                ".safetensors"
            )
    for key, name in weight_map.items():
        names[name].add(key)
    files: dict[Path, set[str] | None] = {index.parent / name: keys for name, keys in names.items()}
    unlisted = sorted(set(index.parent.glob("model-*.safetensors")) - files.keys())
    if unlisted:
        raise CheckpointError(f"{unlisted[0]} is a shard that {index.name} does not know; remove it or mend the index")
    return files


def _headers(path: Path) -> dict[str, Header]:
    file, name = open_shard(path), str(path)
    headers = {}
    for key in file.keys():  # noqa: SIM118 (no mapping)
        if not key.isprintable() or len(key) > 1000:
            raise CheckpointError(f"{path} has the key {key[:60]!r}, which no model uses: it cannot be printed safely")
        view = file.get_slice(key)
        headers[key] = Header(name, key, str(view.get_dtype()), tuple(view.get_shape()))
    return headers
