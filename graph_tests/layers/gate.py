"""A kernel that holds a stream until the host opens it, and that ends by itself when the host never does."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from graph_tests.layers.driver import bindings, compile_kernel, ok

SOURCE = r"""
extern "C" __global__ void graph_tests_gate(volatile unsigned* flags, unsigned long long limit_ns) {
  // flags[0]: the host opens; flags[1]: 1 opened by the host, 2 ended by the deadline.
  unsigned long long began, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(began));
  unsigned state = 2;
  do {
    if (flags[0] != 0) { state = 1; break; }
    __nanosleep(2000);
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - began < limit_ns);
  flags[1] = state;
  __threadfence_system();
}
"""

WAITING, OPENED, EXPIRED = 0, 1, 2


class Gate:
    """Hold streams: ``hold`` launches the kernel, ``state`` says how it stands, ``open`` lets it end."""

    def __init__(self) -> None:
        driver = bindings()
        self._function = compile_kernel(SOURCE, "graph_tests_gate")
        self._driver = driver
        flags = driver.CU_MEMHOSTALLOC_PORTABLE | driver.CU_MEMHOSTALLOC_DEVICEMAP
        self._host = int(ok(driver.cuMemHostAlloc(8, flags)))
        self._device = int(ok(driver.cuMemHostGetDevicePointer(self._host, 0)))
        self._words = (ctypes.c_uint32 * 2).from_address(self._host)

    def hold(self, stream: int, limit_s: float) -> None:
        """Hold one stream (its raw handle) for at most ``limit_s``; the gate must not be holding another."""
        self._words[0], self._words[1] = 0, WAITING
        arguments: tuple[Any, ...] = (
            (self._device, int(limit_s * 1e9)),
            (ctypes.c_void_p, ctypes.c_uint64),
        )
        driver = self._driver
        ok(driver.cuLaunchKernel(self._function, 1, 1, 1, 1, 1, 1, 0, driver.CUstream(stream), arguments, 0))

    @property
    def state(self) -> int:
        """WAITING while the stream is held, then OPENED or EXPIRED."""
        return int(self._words[1])

    def open(self) -> None:
        """Let the held stream go on, and wait for the device."""
        self._words[0] = 1
        torch.cuda.synchronize()

    def close(self) -> None:
        """Free the flags."""
        self.open()
        ok(self._driver.cuMemFreeHost(self._host))
