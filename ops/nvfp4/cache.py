"""Where compiled kernels are kept between processes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


def folders() -> Iterator[Path]:
    """The user's cache, then one among temporary files; made if missing, left out unless this user's alone."""
    user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nvfp4"
    for folder in (user, Path(tempfile.gettempdir()) / f"nvfp4-{os.getuid()}"):
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError:
            continue
        if ours_alone(folder):
            yield folder


def ours_alone(folder: Path) -> bool:
    """Whether only this user can have put files there: in a shared folder, anybody may have left code to be loaded."""
    found = folder.stat()
    return found.st_uid == os.getuid() and not found.st_mode & 0o022
