"""From a configuration to a loaded kernel: source text, NVRTC, a cache of binaries on disk."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .. import cache
from ..errors import CaptureError, NVFP4Error

FOLDER = Path(__file__).parent
OPTIONS = ("--gpu-architecture=sm_90a", "--std=c++17", "--device-as-default-execution-space")


class KernelBuildError(NVFP4Error):
    """The CUDA compiler or driver refused a kernel."""


@dataclass(frozen=True)
class Tile:
    """One way to cut a grouped GEMM: what gemm.cu asks its includer to define.

    Attributes:
        tokens: width of a tile, and ``widths`` the products it may use, narrower ones for tiles with fewer rows.
        warpgroups, blocks: consumers, and 64-row blocks of each. depth: 64-column blocks per stage, stages of the ring.
        registers: of a producer's and of a consumer's thread; (0, 0): what the compiler gives all.
        producers: threads that fill the ring (128 where registers are given).
        split: all warpgroups take the same rows and share out K. resident: blocks per SM.
    """

    tokens: int
    widths: tuple[int, ...]
    warpgroups: int
    blocks: int
    depth: int
    stages: int
    registers: tuple[int, int] = (0, 0)
    producers: int = 128
    split: bool = False
    resident: int = 1

    def __post_init__(self) -> None:
        """State each constraint of gemm.cu once."""
        per_stage = self.depth * self.blocks // (self.warpgroups if self.split else 1)
        launched = self.threads * min(65536 // (self.threads * self.resident) // 8 * 8, 255 // 8 * 8)
        asked = 128 * (self.registers[0] + self.warpgroups * self.registers[1])
        rules = {
            "tokens must be a multiple of 8 up to 256": self.tokens % 8 == 0 and 0 < self.tokens <= 256,
            "widths must be multiples of 8 that ascend to tokens": (
                self.widths == tuple(sorted(set(self.widths)))
                and self.widths[-1:] == (self.tokens,)
                and all(w % 8 == 0 and w > 0 for w in self.widths)
            ),
            "blocks must be 1 or 2": self.blocks in (1, 2),
            "a split tile shares out depth evenly": not self.split or self.depth % self.warpgroups == 0,
            "each warpgroup takes an even number of blocks of a stage": per_stage > 0 and per_stage % 2 == 0,
            "producers must be 32, 64 or 128; 128 where registers are given": (
                self.producers in ((32, 64, 128) if self.registers == (0, 0) else (128,))
            ),
            "registers must be multiples of 8 from 24 to 240": (
                self.registers == (0, 0) or all(24 <= r <= 240 and r % 8 == 0 for r in self.registers)
            ),
            f"registers must fit the {launched} that a block is launched with, they are {asked}": asked <= launched,
            f"a block's shared memory is at most 227 KiB / resident, this one takes {self.smem} bytes": (
                (self.smem + 1024) * self.resident <= 228 * 1024
            ),
        }
        broken = [rule for rule, holds in rules.items() if not holds]
        if broken:
            raise KernelBuildError(f"{self}: {'; '.join(broken)}")

    @property
    def threads(self) -> int:
        """Of a block."""
        return self.warpgroups * 128 + self.producers

    @property
    def smem(self) -> int:
        """The most shared memory that a kernel of this tile takes, in bytes."""
        kinds = [
            (first, gated, route)
            for first in (True, False)
            for gated in (first, False)
            for route in (self.split, False)
        ]
        return max(Gemm(self, first, gated, route=route).smem for first, gated, route in kinds)

    @property
    def rows(self) -> int:
        """Weight rows of a tile."""
        return self.blocks * 64 * (1 if self.split else self.warpgroups)


@dataclass(frozen=True)
class Gemm:
    """One kernel: a tile and everything else that is a constant in its code."""

    tile: Tile
    first: bool
    gated: bool
    kind: int = 0
    limited: bool = False
    scale: int = 0
    route: bool = False

    @property
    def smem(self) -> int:
        """Bytes of shared memory, as gemm.cu lays it out (and asserts)."""
        t = self.tile
        writers = 1 if t.split else t.warpgroups
        pitch = (32 if self.first and self.gated else 64) * t.blocks * 2 + 16
        stage = t.depth * (t.tokens * 128 + t.rows // 64 * 2304)
        sums = (t.warpgroups - 1) * t.blocks * t.tokens * 256 if t.split else 0
        barriers = t.stages * stage + writers * t.tokens * (pitch + 8) + sums
        return (barriers + t.stages * 16 + 8 + 15) // 16 * 16 + self.route * (32 * 24 + 16) + 1024

    def source(self) -> str:
        """CUDA C++ of this kernel."""
        t = self.tile
        constants = {
            "NMAX": t.tokens, "WGS": t.warpgroups, "RB": t.blocks, "KB": t.depth, "STAGES": t.stages,
            "PRODUCER_REGS": t.registers[0], "CONSUMER_REGS": t.registers[1], "FIRST": int(self.first),
            "GATED": int(self.first and self.gated), "KIND": self.kind, "LIMITED": int(self.limited),
            "SCALE": self.scale, "ROUTE": int(self.route), "SPLIT": int(t.split), "PRODUCERS": t.producers,
            "MIN_BLOCKS": t.resident, "EXPECTED_SMEM": self.smem,
            "FOR_VARIANTS(F)": " ".join(f"F({n})" for n in t.widths),
        }  # fmt: skip
        text = _text("gemm.cu")
        declared = "template <int N>\n__device__ void wgmma(float* d, const u32* a, u64 desc);\n"
        products = declared + "".join(_wgmma(n) for n in t.widths)
        return _defines(constants) + text.replace("// WGMMA_WRAPPERS", products)

    entry = "gemm"

    @property
    def name(self) -> str:
        """gemm1 or gemm2."""
        return "gemm1" if self.first else "gemm2"


@dataclass(frozen=True)
class Around:
    """The kernels of around.cu (sort, cut, sum) and pack.cu."""

    entry: str
    smem = 0

    @property
    def name(self) -> str:
        """The entry."""
        return self.entry

    def source(self) -> str:
        """CUDA C++ of this kernel and what stands beside it."""
        return _text("pack.cu" if self.entry == "pack" else "around.cu")


def _text(name: str) -> str:
    return "".join((FOLDER / part).read_text() for part in ("common.cu", name))


def _defines(constants: dict) -> str:
    return "".join(f"#define {name} {value}\n" for name, value in constants.items())


def _wgmma(n: int) -> str:
    """The matrix instruction of 64 x n x 16 with A in registers, as a function of gemm.cu."""
    regs = n // 2
    d = ", ".join(f"%{i}" for i in range(regs))
    a = ", ".join(f"%{regs + i}" for i in range(4))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(regs))
    return (
        f"template <>\n__device__ __forceinline__ void wgmma<{n}>(float* d, const u32* a, u64 desc) {{\n"
        f'    asm volatile("wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 {{{d}}}, {{{a}}}, "\n'
        f'        "%{regs + 4}, 1, 1, 1, 0;"\n'
        f"        : {outputs}\n"
        '        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(desc));\n}\n'
    )


def unavailable() -> str:
    """Why kernels cannot be built here, or an empty text."""
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except Exception as error:  # a missing package, a missing library, or whatever its loader raises
        return f"cuda-python with NVRTC is needed ({type(error).__name__}: {str(error).splitlines()[0]})"
    return ""


def _check(result: tuple, what: str) -> Any:
    code, *values = result
    if int(code):
        raise KernelBuildError(f"{what}: {code.name}")
    return values[0] if len(values) == 1 else values


def binary(source: str) -> bytes:
    """Machine code for sm_90a, from the cache or from NVRTC."""
    from cuda.bindings import nvrtc

    version = "{}.{}".format(*_check(nvrtc.nvrtcVersion(), "NVRTC"))
    tag = hashlib.sha256("\n".join((version, *OPTIONS, source)).encode()).hexdigest()[:24]
    name = f"sm90a_{tag}.cubin"
    for folder in cache.folders():
        with contextlib.suppress(OSError):
            return (folder / name).read_bytes()
    program = _check(nvrtc.nvrtcCreateProgram(source.encode(), b"nvfp4.cu", 0, [], []), "NVRTC")
    options = [option.encode() for option in OPTIONS]
    failed = int(nvrtc.nvrtcCompileProgram(program, len(options), options)[0])
    if failed:
        log = b" " * _check(nvrtc.nvrtcGetProgramLogSize(program), "NVRTC")
        nvrtc.nvrtcGetProgramLog(program, log)
        raise KernelBuildError(f"NVRTC {version} refused a kernel:\n{log.decode(errors='replace')[:2000]}")
    code = b" " * _check(nvrtc.nvrtcGetCUBINSize(program), "NVRTC")
    _check(nvrtc.nvrtcGetCUBIN(program, code), "NVRTC")
    nvrtc.nvrtcDestroyProgram(program)
    for folder in cache.folders():
        with contextlib.suppress(OSError):  # compiled again next time, where none can be written
            with tempfile.NamedTemporaryFile(dir=folder, delete=False) as scratch:
                scratch.write(code)
            os.replace(scratch.name, folder / name)
            break
    return code


@functools.cache
def load(spec: Gemm | Around, device: int) -> int:
    """Address of a kernel's function on a device, which must be current; built and loaded once per process.

    Raises:
        CaptureError: it would have to be built inside a capture. KernelBuildError.
    """
    from cuda.bindings import driver

    if torch.cuda.is_current_stream_capturing():
        raise CaptureError.first_call("moe")
    library = _check(driver.cuLibraryLoadData(binary(spec.source()), [], [], 0, [], [], 0), "loading a kernel")
    kernel = _check(driver.cuLibraryGetKernel(library, spec.entry.encode()), f"finding {spec.entry}")
    if spec.smem:
        limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _check(driver.cuKernelSetAttribute(limit, spec.smem, kernel, device), f"{spec.smem} bytes of shared memory")
    return int(kernel)
