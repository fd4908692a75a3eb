"""What is shipped, and which way imports point."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    pytest.importorskip("hatchling", reason="builds the wheel; comes with the dev extra")
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (path,) = out.glob("*.whl")
    return path


def test_the_wheel_is_pure_and_holds_exactly_three_packages(wheel):
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {n.split("/")[0] for n in names if ".dist-info/" not in n}
    assert tops == {"compiled_moe", "nvfp4", "graph_tests"}
    assert not [n for n in names if "/tests/" in n or n.startswith(("ops/", "bench/"))]
    for needed in (
        "nvfp4/native/moe.cpp",
        "compiled_moe/data/demo/model.safetensors",
        "compiled_moe/data/demo/README.md",
    ):
        assert needed in names
    licence = [n for n in names if n.endswith("licenses/LICENSE")]
    assert licence and "Apache License" in zipfile.ZipFile(wheel).read(licence[0]).decode()
    model = sum(z.file_size for z in zipfile.ZipFile(wheel).infolist() if "/data/demo/" in z.filename)
    assert model <= 16e6


def test_the_wheel_runs_without_the_tree(wheel, tmp_path):
    code = "import nvfp4, compiled_moe, graph_tests; print(compiled_moe.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": str(wheel)}, capture_output=True, text=True
    )
    assert done.returncode == 0 and str(wheel) in done.stdout, done.stderr


def test_ops_is_no_import_name():
    pytest.importorskip("ruff", reason="comes with the dev extra")
    command = [sys.executable, "-m", "ruff", "check", "--stdin-filename", "x.py", "-"]
    done = subprocess.run(command, cwd=ROOT, input="import ops\n", capture_output=True, text=True)
    assert done.returncode == 1 and "source root" in done.stdout


def test_importing_everything_patches_nothing_and_needs_no_transformers(tmp_path):
    code = (
        "import sys; sys.modules['transformers'] = None; import torch; before = dict(vars(torch.nn.Module)); "
        "import nvfp4, compiled_moe, compiled_moe.decode, compiled_moe.generate, graph_tests; "
        "assert dict(vars(torch.nn.Module)) == before; assert not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
