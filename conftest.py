"""Markers are resolved here and nowhere else; workers side by side (pytest -n 2) compute with one thread each."""

import functools
import os

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:  # workers that share cores wait for each other's threads, ten times longer
    os.environ.setdefault("OMP_NUM_THREADS", "1")

NO_GPU = "no CUDA device: the last GPU results are in bench/results and graph_tests/results"


@functools.cache
def _capability() -> tuple[int, int] | None:
    import torch

    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None


def pytest_collection_modifyitems(items):
    for item in items:
        needs = [m for m in ("gpu", "sm90", "sm100") if item.get_closest_marker(m)]
        if not needs:
            continue
        have = _capability()
        if have is None:
            item.add_marker(pytest.mark.skip(reason=NO_GPU))
        elif "sm90" in needs and have[0] != 9:
            item.add_marker(pytest.mark.skip(reason=f"needs compute capability 9.x, this GPU has {have}"))
        elif "sm100" in needs and have[0] < 10:
            item.add_marker(pytest.mark.skip(reason=f"needs compute capability 10 or more, this GPU has {have}"))
