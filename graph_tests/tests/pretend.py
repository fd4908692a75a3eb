"""A pretend GPU: the GPU layers run on CPU tensors, so that what they conclude can be tested without a device.

A "captured graph" is the callable called again on the static buffers: right for callables that keep no state on the
host, which is what makes them sound. Nothing about CUDA itself is tested by this.
"""

from __future__ import annotations

import contextlib
import types

import pytest
import torch
from torch.overrides import TorchFunctionMode

from graph_tests.engine import run_case
from graph_tests.inputs import tensors
from graph_tests.layers import bench, capture, graphwalk, memory, profile, replay, runahead, runtime
from graph_tests.layers.graphwalk import Node, Walk
from graph_tests.source import is_user_file


class _Stream:
    cuda_stream = 1

    def wait_stream(self, other):
        pass


class _Graph:
    again = staticmethod(lambda: None)

    def __init__(self, keep_graph=False):
        pass

    def pool(self):
        return (0, 1)

    def raw_cuda_graph(self):
        return 0

    def replay(self):
        self.again()


class _Gate:
    state = 0

    def hold(self, stream, limit):
        pass

    def open(self):
        pass

    close = open


class _OnCpu(TorchFunctionMode):
    def __torch_function__(self, func, types_, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


class _Generator:
    def __new__(cls, device="cpu"):
        return torch._C.Generator("cpu")


def _replayable(real):
    def captured(bench_, args, **options):
        result = real(bench_, args, **options)

        def again():
            for old, new in zip(tensors(result.out), tensors(bench_.capture_fn(*args)), strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)

        result.graph.again = again
        return result

    return captured


@pytest.fixture
def pretend_gpu(monkeypatch):
    """Judge a case with the GPU layers on CPU tensors."""
    cuda, put = torch.cuda, monkeypatch.setattr
    stream = _Stream()
    answers = {
        "is_available": True,
        "synchronize": None,
        "Stream": stream,
        "current_stream": stream,
        "set_stream": None,
        "stream": contextlib.nullcontext(),
        "graph": contextlib.nullcontext(),
        "get_device_name": "pretend",
        "get_device_capability": (9, 0),
        "get_sync_debug_mode": 0,
        "set_sync_debug_mode": None,
        "memory_stats": {"num_device_alloc": 1},
        "host_memory_stats": {},
        "memory_allocated": 1,
        "memory_reserved": 1,
    }
    for name, answer in answers.items():
        put(cuda, name, lambda *a, answer=answer, **k: answer)
    put(cuda, "CUDAGraph", _Graph)
    put(cuda, "manual_seed_all", lambda seed: torch.default_generator.manual_seed(seed))
    put(torch, "Generator", _Generator)
    put(runtime, "explicit_syncs", lambda heard: contextlib.nullcontext())
    put(runahead, "Gate", _Gate)
    put(profile, "profiled", lambda call: (call(), _trace())[1])
    put(profile, "Profiler", _profiler)
    put(graphwalk, "walk", lambda raw: Walk((Node(0, "kernel", "k", (1, 1, 1), (1, 1, 1)),), ()))
    put(graphwalk, "capturing_graph", lambda stream: None)
    put(capture, "capture", _replayable(capture.capture))
    put(replay, "capture", capture.capture)
    put(memory, "pool_ranges", lambda pool: [])
    put(memory, "free_ranges", lambda: [])
    put(memory, "fill", lambda ranges, byte: None)
    on_cuda = types.SimpleNamespace(device=types.SimpleNamespace(type="cuda"))
    put(bench, "tensors", lambda tree: [on_cuda])
    is_user_file.cache_clear()

    def run(case):
        with _OnCpu():
            return run_case(case)

    return run


def _trace():
    return profile.Trace([profile.Event(profile.WINDOW, "user_annotation", 0, 1.0, 0, 1, {})])


@contextlib.contextmanager
def _profiler():
    yield types.SimpleNamespace(window=contextlib.nullcontext, trace=_trace())
