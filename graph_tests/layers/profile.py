"""One profiled call: what the CUDA runtime was asked, and what the device really executed.

Other profilers (nsys, a torch profiler around the tests) own CUPTI alone: then nothing can be measured here.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch

WINDOW = "graph_tests.window"
HOST_WAITS = {
    "cudaDeviceSynchronize": "torch.cuda.synchronize",
    "cudaStreamSynchronize": "Stream.synchronize",
    "cudaEventSynchronize": "Event.synchronize",
    "cuCtxSynchronize": "cuCtxSynchronize",
    "cuStreamSynchronize": "cuStreamSynchronize",
    "cuEventSynchronize": "cuEventSynchronize",
    "cudaMemcpy": "cudaMemcpy",
    "Stream Sync": "stream synchronisation",
    "Event Sync": "event synchronisation",
    "Context Sync": "context synchronisation",
    "Device Sync": "device synchronisation",
}
ALLOCATIONS = frozenset(
    {"cudaMalloc", "cudaFree", "cudaMallocHost", "cudaHostAlloc", "cudaFreeHost", "cudaHostRegister"}
    | {"cudaHostUnregister", "cudaMallocManaged", "cudaMallocPitch", "cudaMalloc3D", "cuMemAlloc", "cuMemFree"}
    | {"cuMemAlloc_v2", "cuMemFree_v2", "cuMemCreate", "cuMemMap", "cuMemUnmap", "cuMemHostAlloc"}
    | {"cuMemAllocHost_v2", "cuMemFreeHost"}
)
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaLaunchCooperativeKernel", "cuLaunchCooperativeKernel")


@dataclasses.dataclass(frozen=True)
class Event:
    """One record of the profiler; ``begin`` is in nanoseconds since the epoch."""

    name: str
    category: str
    begin: int
    duration_us: float
    correlation: int
    thread: Any
    args: dict[str, Any]


class Trace:
    """The records inside the window of one profiled call."""

    def __init__(self, events: list[Event]) -> None:
        window = next((e for e in events if e.name == WINDOW and e.category == "user_annotation"), None)
        if window is None:
            raise RuntimeError("the profiler recorded nothing: its window is missing from the trace")
        end = window.begin + int(window.duration_us * 1000)
        self.calls = [
            e
            for e in events
            if e.category in ("cuda_runtime", "cuda_driver", "cuda_sync") and window.begin <= e.begin <= end
        ]
        asked = {e.correlation for e in self.calls if e.correlation and e.category != "cuda_sync"}
        known = {e.correlation for e in events if e.category in ("cuda_runtime", "cuda_driver")}
        self.executed = [
            e
            for e in events
            if e.category in ("kernel", "gpu_memcpy", "gpu_memset")
            # A launch that the profiler does not record still shows as a kernel inside the window.
            and (e.correlation in asked or (e.correlation not in known and window.begin <= e.begin <= end))
        ]
        self.cpu_ops = [e for e in events if e.category == "cpu_op" and window.begin <= e.begin <= end]

    @property
    def launches(self) -> int:
        """Kernel launches asked for."""
        return sum(e.name.startswith(LAUNCHES) for e in self.calls)

    def asked_at(self, event: Event) -> int:
        """When the call that caused a device event began."""
        return next((c.begin for c in self.calls if c.correlation == event.correlation), event.begin)

    def custom_op_at(self, mark: int) -> str:
        """The custom operator under way at ``mark``, or an empty string."""
        names = [e.name for e in self.cpu_ops if e.begin <= mark <= e.begin + e.duration_us * 1000 and "::" in e.name]
        return next((n for n in names if not n.startswith(("aten::", "prim::", "prims::"))), "")


def busy() -> str:
    """Why the profiler cannot be used now, or an empty string."""
    if getattr(torch.autograd.profiler, "_is_profiler_enabled", False) or torch._C._autograd._profiler_enabled():
        return "another torch profiler is attached"
    for name in ("CUDA_INJECTION64_PATH", "NSYS_PROFILING_SESSION_ID", "NV_COMPUTE_PROFILER_PERFWORKS_DIR"):
        if os.environ.get(name):
            return f"another profiler is attached ({name} is set)"
    return ""


class Profiler:
    """Context around a call; ``window`` marks the part to look at, ``trace`` is there after the context ended."""

    def __init__(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        config = torch._C._profiler._ExperimentalConfig(enable_cuda_sync_events=True)
        self._profile = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], experimental_config=config)
        self.trace: Trace | None = None

    def __enter__(self) -> Profiler:
        self._profile.__enter__()
        return self

    def window(self) -> Any:
        """Context: the part of the profile to look at."""
        return torch.profiler.record_function(WINDOW)

    def __exit__(self, *args: Any) -> None:
        self._profile.__exit__(*args)
        if args[0] is None:
            self.trace = Trace(_read(self._profile))


def profiled(call: Callable[[], Any]) -> Trace:
    """Profile one call and wait for the device inside the profile, outside the window."""
    with Profiler() as profiler:
        with profiler.window():
            call()
        torch.cuda.synchronize()
    assert profiler.trace is not None
    return profiler.trace


def _read(profile: Any) -> list[Event]:
    with tempfile.TemporaryDirectory(prefix="graph_tests_") as folder:
        path = os.path.join(folder, "trace.json")
        profile.export_chrome_trace(path)
        with open(path, errors="replace") as file:
            data = json.load(file)
    base = int(data.get("baseTimeNanoseconds", 0))
    return [
        Event(
            name=str(e.get("name", "")),
            category=str(e.get("cat", "")),
            begin=base + round(float(e["ts"]) * 1000),
            duration_us=float(e.get("dur", 0.0)),
            correlation=int(e.get("args", {}).get("correlation", 0) or 0),
            thread=e.get("tid"),
            args=e.get("args", {}),
        )
        for e in data["traceEvents"]
        if e.get("ph") == "X"
    ]
