"""Faulty callables that launch kernels by hand: Triton, and NVRTC through the driver."""

from __future__ import annotations

import ctypes

import torch
import triton
import triton.language as tl

from graph_tests.layers.driver import bindings, compile_kernel, ok
from graph_tests.tests.faulty import E, make

SCALE_SOURCE = """
extern "C" __global__ void graph_tests_scale(float* out, const float* x, int n) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) out[i] = 2.0f * x[i];
}
"""


@triton.jit
def double_kernel(out, x, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(out + offsets, tl.load(x + offsets, mask=mask) * 2, mask=mask)


@triton.autotune(configs=[triton.Config({"BLOCK": b}) for b in (256, 512, 1024)], key=["rows"])
@triton.jit
def tuned_kernel(out, x, n, rows, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(out + offsets, tl.load(x + offsets, mask=mask) * 2, mask=mask)


@triton.jit
def per_block_kernel(out, x, rows, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    offsets = tl.arange(0, BLOCK)
    if row < rows:
        tl.store(out + row * BLOCK + offsets, tl.load(x + row * BLOCK + offsets) * 2)


def launch(grid: int, out: torch.Tensor, x: torch.Tensor, stream: int) -> None:
    """Launch the NVRTC kernel with ``grid`` blocks on a raw stream."""
    driver = bindings()
    arguments = (
        (out.data_ptr(), x.data_ptr(), x.numel()),
        (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int),
    )
    kernel = compile_kernel(SCALE_SOURCE, "graph_tests_scale")
    ok(driver.cuLaunchKernel(kernel, grid, 1, 1, 256, 1, 1, 0, driver.CUstream(stream), arguments, 0))


def first_call(x, ids):
    if not torch.cuda.is_current_stream_capturing():
        return x * 2
    out = torch.empty_like(x)
    double_kernel[(triton.cdiv(x.numel(), 1024),)](out, x, x.numel(), BLOCK=1024)  #
    return out


def autotune(x, ids):
    out = torch.empty_like(x)
    grid = lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)  # noqa: E731
    tuned_kernel[grid](out, x, x.numel(), x.shape[0])  #
    return out


def default_stream(x, ids):
    out = torch.empty_like(x)
    launch(64, out, x, torch.cuda.default_stream().cuda_stream)  #
    return out


def host_node(x, ids):
    from cuda.bindings import runtime

    y = x * 2
    callback = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p).value
    stream = torch.cuda.current_stream().cuda_stream
    ok(runtime.cudaLaunchHostFunc(stream, runtime.cudaHostFn_t(callback), 0))  #
    return y + 1


def make_counts(seed: int):
    """x, and per-expert counts that the host happens to know."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(1, 40, (E,), generator=generator).tolist()
    return make(seed)[0], counts


def host_grid(x, counts):
    out = torch.zeros_like(x)
    per_block_kernel[(max(counts),)](out, x, x.shape[0], BLOCK=256)  #
    return out


def empty(x, ids):
    out = torch.empty_like(x)
    launch(x.shape[0], out, x, torch.cuda.current_stream().cuda_stream)  #
    return out
