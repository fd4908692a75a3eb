"""Hopper's kernels compile for sm_90a without a GPU, to the machine code that was meant."""

import re
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import triton

from nvfp4.format import ACTIVATIONS
from nvfp4.sm90 import compile as build
from nvfp4.sm90 import tiles

TILES = tiles.table()[0]
THIN, WIDE = next(iter(TILES.values())), list(TILES.values())[-1]
GEMMS = {
    **{f"{name}-gemm{2 - first}": build.Gemm(t, first, first) for name, t in TILES.items() for first in (True, False)},
    **{f"wide-{a}": build.Gemm(WIDE, True, a != "relu2", k, a in ("swigluoai", "swiglustep"), 3)
       for a, k in ACTIVATIONS.items() if a != "silu"},
    "wide-shared": build.Gemm(WIDE, False, False, scale=1), "wide-expert": build.Gemm(WIDE, False, False, scale=2),
    "few-1": build.Gemm(THIN, True, True, scale=3, route=True), "few-2": build.Gemm(THIN, False, False, route=True),
}  # fmt: skip
AROUND = {name: build.Around(name) for name in ("sort", "cut", "sum", "pack")}
KERNELS = GEMMS | AROUND


def nvrtc(source):
    from cuda.bindings import nvrtc as api

    def must(result):
        assert int(result[0]) == 0, result
        return result[1] if len(result) > 1 else None

    program = must(api.nvrtcCreateProgram(source.encode(), b"nvfp4.cu", 0, [], []))
    failed = int(api.nvrtcCompileProgram(program, len(build.OPTIONS), [o.encode() for o in build.OPTIONS])[0])
    log = b" " * must(api.nvrtcGetProgramLogSize(program))
    must(api.nvrtcGetProgramLog(program, log))
    assert not failed, log.decode()[:3000]
    code = b" " * must(api.nvrtcGetCUBINSize(program))
    must(api.nvrtcGetCUBIN(program, code))
    return code, log.decode()


def nvcc(source):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "nvfp4.cu")
        path.write_text(source)
        command = ["nvcc", "-arch=sm_90a", "-std=c++17", "-cubin", "-o", f"{path}bin", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[:3000]
        return Path(f"{path}bin").read_bytes(), done.stderr


@pytest.fixture(scope="module")
def built():
    """Name to (machine code, what the compiler said, disassembly, resources)."""
    why = build.unavailable()
    if why and not shutil.which("nvcc"):
        pytest.skip(f"NOT COMPILED: {why}, and there is no nvcc; pip install nvidia-cuda-nvrtc cuda-bindings")
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.exists():
        pytest.skip(f"NOT COMPILED: this Triton brings no {tool.name}")

    def one(spec):
        code, log = (nvcc if why else nvrtc)(spec.source())
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(code)
            file.flush()
            listed = [
                subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout
                for option in ("-sass", "--dump-resource-usage")
            ]
        return code, log, *listed

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(KERNELS, pool.map(one, KERNELS.values()), strict=True))


def resources(text, entry):
    line = re.search(rf"Function {entry}:\n(.*)", text).group(1)
    return {name: int(value) for name, value in re.findall(r"(\w+):(\d+)", line)}


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_no_spills_and_nothing_serialised(built, name):
    _, log, sass, used = built[name]
    found = resources(used, KERNELS[name].entry)
    assert found["STACK"] == found["LOCAL"] == 0
    if name in GEMMS:
        assert not re.findall(r"\b(?:LDL|STL)\b", sass)
    assert "C75" not in log and "erialized" not in log, log


@pytest.mark.slow
@pytest.mark.parametrize("name", GEMMS)
def test_weights_go_from_registers_into_the_matrix_unit(built, name):
    spec, sass = GEMMS[name], built[name][2]
    lines = sass.splitlines()
    products = [(i, line) for i, line in enumerate(lines) if "GMMA" in line and "HGMMA" in line]
    shape = re.compile(r"HGMMA\.64x(\d+)x16\.F32\.BF16 R\d+, R\d+, gdesc\[UR\d+\]")
    widths = {}
    for i, line in products:
        width = int(shape.search(line).group(1))  # A in registers, B by descriptor: any other form fails here
        widths.setdefault(width, []).append(i)
    assert set(widths) == set(spec.tile.widths)
    for places in widths.values():
        assert len(places) == 8  # two blocks of four: the loop is not unrolled further
        between = lines[places[0] : places[-1]]
        assert not [line for line in between if re.search(r"\bST[SGL]\b", line)]


@pytest.mark.slow
@pytest.mark.parametrize("name", GEMMS)
def test_registers_suffice_for_what_the_warps_ask_for(built, name):
    tile, (_, _, sass, used) = GEMMS[name].tile, built[name]
    launched = resources(used, "gemm")["REG"] * tile.threads
    assert launched * tile.resident <= 65536
    assert 128 * (tile.registers[0] + tile.warpgroups * tile.registers[1]) <= launched  # else setmaxnreg waits for ever
    assert sass.count("USETMAXREG") == (2 if tile.registers != (0, 0) else 0)
