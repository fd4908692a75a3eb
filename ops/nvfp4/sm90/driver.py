"""cuLaunchKernelEx at the price of one foreign call: an eager layer is three to six launches.

cuda-python builds and loads the kernels; its own launch costs several times this one in Python. The interpreter's lock
is held during the call (PyDLL): giving it up and taking it back costs more than the launch.
"""

from __future__ import annotations

import ctypes
import functools

from ..errors import NVFP4Error

OVERLAP = 6
"""CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION."""


class LaunchError(NVFP4Error):
    """The driver refused a launch."""


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16)]


class _Config(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "smem")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    ]


@functools.cache
def _entry():
    entry = ctypes.PyDLL("libcuda.so.1").cuLaunchKernelEx
    entry.argtypes = [ctypes.c_void_p] * 4
    entry.restype = ctypes.c_int
    return entry


class Launch:
    """A kernel, its block and shared memory, and one structure of arguments that the caller fills in before each go.

    For one thread: between filling in and launching, another may run.
    """

    def __init__(self, handle: int, threads: int, smem: int, arguments: ctypes.Structure) -> None:
        self.arguments = arguments
        self._attribute = _Attribute(OVERLAP, 0, (1,))
        self._config = _Config(1, 1, 1, threads, 1, 1, smem, None, ctypes.pointer(self._attribute), 1)
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        self._call = (ctypes.addressof(self._config), handle, ctypes.addressof(self._pointers), None)

    def __call__(self, grid: tuple[int, int], stream: int) -> None:
        """Launch; the kernel may begin before the one before it has ended (see gemm.cu, previous_done)."""
        config = self._config
        config.grid_x, config.grid_y = grid
        config.stream = stream
        code = _entry()(*self._call)
        if code:
            raise LaunchError(f"a kernel of the layer did not launch: CUDA error {code}")
