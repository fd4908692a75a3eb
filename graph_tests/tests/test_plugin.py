import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest
import torch

from graph_tests import check
from graph_tests.plugin import load_arguments
from graph_tests.tests import faulty

TESTS = """
import torch

def make(seed):
    return torch.randn(8, 8, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)),

def test_good(graph_check):
    scale = 2.0
    graph_check(lambda x: x * scale, make)
    assert graph_check.report(lambda x: x.cpu(), make).findings[0].operation in ("cpu", "_to_copy")

def test_bad(graph_check):
    graph_check(lambda x: x / x.sum().item(), make)
"""


def python(*args, **options):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    return subprocess.run(
        [sys.executable, *args], capture_output=True, text=True, env=environment, timeout=300, **options
    )


def test_importing_the_plugin_is_quick_and_brings_no_torch():
    code = (
        "import pytest, sys, time; t = time.perf_counter(); import graph_tests.plugin; "
        "took = time.perf_counter() - t; assert 'torch' not in sys.modules, 'torch'; assert took < 0.05, took"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="these are the verdicts without a GPU")
def test_the_fixture_judges_closures_in_a_process_of_their_own(tmp_path):
    (tmp_path / "test_mine.py").write_text(TESTS)
    junit = tmp_path / "junit.xml"
    done = python("-m", "pytest", "-q", *load_arguments(), f"--junitxml={junit}", "test_mine.py", cwd=tmp_path)
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "host read: item" in done.stdout and "cure:" in done.stdout
    failures = [c.get("name") for c in ElementTree.parse(junit).iter("testcase") if c.find("failure") is not None]
    assert failures == ["test_bad"]


def test_check_runs_importable_functions_elsewhere_and_closures_here():
    report = check(faulty.item, faulty.make, layers=("lint", "static"))
    assert report.isolated and report.findings[0].operation == "item"
    closure = check(lambda x, ids: x / x.sum().item(), faulty.make, layers=("lint", "static"))
    assert not closure.isolated and closure.findings[0].operation == "item"
    assert "run inside this process" in str(closure)
