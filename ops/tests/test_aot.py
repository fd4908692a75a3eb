"""Every Triton kernel compiles for every architecture that is promised, with ptxas, on a machine without a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CAPABILITIES = ("80", "90", "100")


@pytest.fixture(scope="module")
def compiled():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_DEFAULT_FP_FUSION": "1"}
    command = [sys.executable, str(Path(__file__).with_name("aot.py")), *CAPABILITIES]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [line.split() for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_all_kernels_on_all_architectures(compiled):
    from nvfp4.kernels import health, ids, moe, quantize, route

    modules = (health, ids, moe, quantize, route)
    helpers = {"load_weight", "multiply", "row_scale", "find_tile", "local_expert", "inspect_row"}
    kernels = {
        name for m in modules for name, f in vars(m).items()
        if hasattr(f, "arg_names") and f.fn.__module__ == m.__name__ and name not in helpers
    }  # fmt: skip
    assert {(line[0], line[1]) for line in compiled} == {(k, f"sm_{c}") for k in kernels for c in CAPABILITIES}
    assert all(int(line[2]) > 1000 for line in compiled)


@pytest.mark.slow
def test_matrix_products_use_tensor_cores_and_no_local_memory(compiled):
    products = [line for line in compiled if line[0] in ("gemm1", "gemm2", "linear")]
    assert all(line[4] != "-" and line[5] == "local=0" for line in products)
    best = {arch: {line[4] for line in products if line[1] == arch} for arch in ("sm_80", "sm_90", "sm_100")}
    assert best["sm_80"] == {"mma.sync"} and "wgmma" in best["sm_90"] and "tcgen05.mma" in best["sm_100"]
