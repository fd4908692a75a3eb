"""The few driver calls that several layers need, through cuda-python."""

from __future__ import annotations

import functools
from typing import Any

import torch


class CudaError(RuntimeError):
    """A driver or NVRTC call failed; the text names the error."""


class NoBindings(RuntimeError):
    """cuda-python is not installed."""


@functools.cache
def bindings() -> Any:
    """The module cuda.bindings.driver; NoBindings says what to install."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise NoBindings("cuda-bindings is not installed: pip install 'cuda-bindings>=13'") from error
    return driver


def ok(result: tuple[Any, ...]) -> Any:
    """The values of a call's result without its status; CudaError when the status is not success."""
    status, values = result[0], result[1:]
    if int(status) != 0:
        raise CudaError(str(getattr(status, "name", status)))
    if not values:
        return None
    return values[0] if len(values) == 1 else values


@functools.cache
def compile_kernel(source: str, name: str) -> Any:
    """Compile one extern "C" kernel with NVRTC for the current GPU and return its CUfunction."""
    from cuda.bindings import nvrtc

    driver = bindings()
    torch.cuda.current_stream()  # the primary context exists from here on
    torch.zeros(1, device="cuda")
    major, minor = torch.cuda.get_device_capability()
    program = ok(nvrtc.nvrtcCreateProgram(source.encode(), f"{name}.cu".encode(), 0, [], []))
    flags = [f"--gpu-architecture=sm_{major}{minor}".encode()]
    status = nvrtc.nvrtcCompileProgram(program, len(flags), flags)[0]
    if int(status) != 0:
        log = b" " * ok(nvrtc.nvrtcGetProgramLogSize(program))
        nvrtc.nvrtcGetProgramLog(program, log)
        raise CudaError(f"NVRTC refused the kernel {name}: {log.decode(errors='replace')[:500]}")
    image = b" " * ok(nvrtc.nvrtcGetCUBINSize(program))
    ok(nvrtc.nvrtcGetCUBIN(program, image))
    module = ok(driver.cuModuleLoadData(image))
    return ok(driver.cuModuleGetFunction(module, name.encode()))


def pointer_kind(address: int) -> str:
    """What an address is: device, host (pinned or registered), managed, array; empty when the driver knows it not."""
    driver = bindings()
    attribute = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
    status, value = driver.cuPointerGetAttribute(attribute, driver.CUdeviceptr(address))
    if int(status) != 0:
        return ""
    return {1: "host", 2: "device", 3: "array", 4: "managed"}.get(int(value), "")


def fill(ranges: list[tuple[int, int]], byte: int) -> None:
    """Set device memory ranges (address, bytes) to one byte value, and wait."""
    driver = bindings()
    stream = driver.CUstream(torch.cuda.current_stream().cuda_stream)
    for address, size in ranges:
        if size:
            ok(driver.cuMemsetD8Async(driver.CUdeviceptr(address), byte, size, stream))
    torch.cuda.synchronize()
