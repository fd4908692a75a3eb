"""Where compiled kernels are taken from."""

import pytest

from nvfp4 import cache, native


@pytest.mark.parametrize("mode, ours", [(0o700, True), (0o755, True), (0o777, False), (0o770, False)])
def test_a_folder_that_others_can_write_is_not_trusted(mode, ours, tmp_path):
    folder = tmp_path / "nvfp4"
    folder.mkdir()
    folder.chmod(mode)
    assert cache.ours_alone(folder) is ours


def test_a_planted_library_is_passed_over(tmp_path, monkeypatch):
    open_to_all = tmp_path / "cache" / "nvfp4"
    open_to_all.mkdir(parents=True)
    open_to_all.chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(cache.tempfile, "gettempdir", lambda: str(tmp_path / "temporary"))
    loaded: list = []
    monkeypatch.setattr(native, "_load", loaded.append)
    why = native.build.__wrapped__().why
    assert str(open_to_all) not in why and not any(open_to_all == path.parent for path in loaded)
