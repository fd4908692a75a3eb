"""The Python standard library's own source as a corpus: deterministic, deduplicated, with a stable held-out split."""

from __future__ import annotations

import hashlib
import os
import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F

from bench.bits_per_byte import END_OF_TEXT, encode

SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "pydoc_data", "encodings"}  # foreign, or tables
SKIPPED_FILES = {"html/entities.py", "sitecustomize.py", "usercustomize.py"}
HELDOUT_LIMIT = 200_000  # bytes, header lines included


@dataclass(frozen=True)
class SourceFile:
    """One file of the corpus; `split` is "train" or "heldout"."""

    path: str
    size: int
    sha256: str
    split: str
    text: bytes = field(repr=False)

    @property
    def document(self) -> bytes:
        """What a model sees: one comment that names the file, then the file."""
        return f"# {self.path}\n".encode() + self.text


def read_sources(root: Path | None = None, heldout_limit: int = HELDOUT_LIMIT) -> list[SourceFile]:
    """Return every file of the standard library that is used, sorted by path.

    Empty files, files that are not UTF-8, links and exact duplicates are left out. The held-out split takes files in
    the order of the SHA-256 of their relative path, so it moves little between Python versions, and ends before the
    first one that would pass `heldout_limit`; a file above a quarter of the limit always trains.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    texts = {path: text for path in _paths(root) if (text := (root / path).read_bytes()) and _is_utf8(text)}
    digests = {path: hashlib.sha256(text).hexdigest() for path, text in texts.items()}
    first = {digest: path for path, digest in reversed(digests.items())}
    paths = [path for path, digest in digests.items() if first[digest] == path]
    if not paths:
        raise ValueError(f"no Python source under {root}: give the folder of the standard library")
    heldout, total = set(), 0
    for path in sorted(paths, key=lambda path: hashlib.sha256(path.encode()).digest()):
        size = len(path) + 3 + len(texts[path])
        if size > heldout_limit // 4:
            continue
        if total + size > heldout_limit:
            break
        heldout.add(path)
        total += size
    return [
        SourceFile(path, len(texts[path]), digests[path], "heldout" if path in heldout else "train", texts[path])
        for path in paths
    ]


def manifest(files: list[SourceFile], version: str | None = None) -> dict:
    """Return what is needed to find the same text again: version, one row a file, and one hash over all rows.

    `version` is the Python that the files belong to, the running one by default.
    """
    rows = [{key: value for key, value in asdict(file).items() if key != "text"} for file in files]
    listing = "".join(f"{file.sha256}  {file.split}  {file.path}\n" for file in files)
    return {
        "source": "the Python standard library",
        "python": version or platform.python_version(),
        "sha256_of_list": hashlib.sha256(listing.encode()).hexdigest(),
        "bytes": {split: sum(f.size for f in files if f.split == split) for split in ("train", "heldout")},
        "files": rows,
    }


def heldout_text(files: list[SourceFile]) -> bytes:
    """Return the held-out documents, one after the other."""
    return b"".join(file.document for file in files if file.split == "heldout")


def random_windows(
    files: list[SourceFile], batch: int, window: int, seed: int, device: str = "cpu"
) -> Iterator[torch.Tensor]:
    """Yield ids [batch, window + 1] int64 from random places of the training text, where each file follows END_OF_TEXT.

    The stream never ends and depends on the seed alone. The text lies on the device; only the places are copied.
    """
    documents = [encode(file.document) for file in files if file.split == "train"]
    stream = torch.cat([F.pad(ids, (1, 0), value=END_OF_TEXT) for ids in documents]).to(device)
    offsets = torch.arange(window + 1, device=device)
    generator = torch.Generator().manual_seed(seed)
    while True:
        places = torch.randint(len(stream) - window, (batch, 1), generator=generator)
        yield stream[places.to(device) + offsets]


def _paths(root: Path) -> list[str]:
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS and not name.startswith("config-")]
        for name in names:
            path = Path(folder, name)
            relative = path.relative_to(root).as_posix()
            generated = relative in SKIPPED_FILES or name.startswith("_sysconfigdata")
            if name.endswith(".py") and not generated and not path.is_symlink():
                found.append(relative)
    return sorted(found)


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
