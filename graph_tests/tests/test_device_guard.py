"""The stand-in for CUDA's device guard: a process that was killed while it built one must not block the next."""

from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

from graph_tests.layers import fake_cuda

pytestmark = pytest.mark.skipif(torch.version.cuda is not None, reason="this wheel has a real one")


def test_it_is_built_apart_from_stale_locks_once_and_found_again(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shared = tmp_path / "torch_extensions"
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(shared))
    (shared / "graph_tests_device_guard").mkdir(parents=True)
    (shared / "graph_tests_device_guard" / "lock").touch()  # what a killed build leaves; torch waits for it for ever
    built: list[Path] = []
    loaded: list[str] = []

    def build(name, sources, build_directory=None, **_):
        folder = Path(build_directory or cpp_extension._get_build_directory(name, False))
        assert not (folder / "lock").exists(), "torch would wait here for ever"
        (folder / f"{name}.so").write_bytes(b"library")
        built.append(folder)

    monkeypatch.setattr(cpp_extension, "load", build)
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    assert fake_cuda.device_guard.__wrapped__() == fake_cuda.device_guard.__wrapped__() == ""
    (kept,) = (tmp_path / "cache" / "graph_tests").iterdir()
    assert len(built) == 1 and not built[0].exists() and loaded == [str(kept)] and kept.read_bytes() == b"library"


def test_what_cannot_be_built_is_a_reason(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def build(*_, **__):
        raise RuntimeError("no g++ here")

    monkeypatch.setattr(cpp_extension, "load", build)
    assert "no g++ here" in fake_cuda.device_guard.__wrapped__() and not list(tmp_path.rglob("*.so"))
