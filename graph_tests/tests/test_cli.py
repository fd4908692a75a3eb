import json
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from graph_tests.cli import app
from graph_tests.verdict import SCHEMA_VERSION, Report

CASES = """
import os, time, torch
from graph_tests.case import case

def make(seed):
    return torch.randn(8, 8, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)),

@case(make)
def good(x):
    return x.relu()

@case(make)
def bad(x):
    return x / x.sum().item()

@case(make, timeout_s=9)
def hang(x):
    while True:
        time.sleep(0.01)  # here

@case(make)
def crash(x):
    os.abort()  # there
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("cases") / "some_cases.py"
    path.write_text(CASES)
    return str(path)


def run(*args):
    return CliRunner().invoke(app, list(args))


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("run", "no_such_module"), "there is no module 'no_such_module'"),
        (("run", "no_such_file.py"), "there is no file no_such_file.py"),
        (("run", "graph_tests.verdict"), "holds no cases"),
        (("run", "graph_tests.tests.table:nothing"), "has no case 'nothing'"),
        (("run", "graph_tests.tests.table:item", "--layer", "magic"), "no such layer: magic"),
    ],
)
def test_usage_errors_are_sentences_and_exit_2(args, said):
    done = run(*args)
    assert done.exit_code == 2 and said in done.output and "Traceback" not in done.output


def test_list_names_the_cases(file):
    done = run("list", file, "--json")
    assert [row["case"] for row in json.loads(done.stdout)] == ["good", "bad", "hang", "crash"]
    assert run("list").exit_code == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="these are the verdicts without a GPU")
def test_exit_codes_and_json_without_a_gpu(file):
    good = run("run", f"{file}:good", "--json")
    document = json.loads(good.stdout)
    assert good.exit_code == 0 and document["schema_version"] == SCHEMA_VERSION
    assert Report.from_dict(document["reports"][0]).verdict == "STATIC_CLEAN"
    demanded = run("run", f"{file}:good", "--require-gpu")
    assert demanded.exit_code == 3 and "demanded" in demanded.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="these are the verdicts without a GPU")
def test_a_hang_and_a_crash_leave_the_other_cases_judged(file):
    done = run("run", file, "--json", "-j", "2")
    reports = {r["name"]: r for r in json.loads(done.stdout)["reports"]}
    assert done.exit_code == 1
    assert {n: r["verdict"] for n, r in reports.items()} == {
        "good": "STATIC_CLEAN",
        "bad": "STATIC_REFUTED",
        "hang": "HANG",
        "crash": "CRASH",
    }
    lines = CASES.splitlines()
    assert f"some_cases.py:{next(i for i, t in enumerate(lines, 1) if t.endswith('# here'))}" in reports["hang"]["why"]
    assert (
        f"some_cases.py:{next(i for i, t in enumerate(lines, 1) if t.endswith('# there'))}" in reports["crash"]["why"]
    )


def test_a_script_that_checks_without_a_guard_is_told_so(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, graph_tests\n"
        "def make(seed):\n    return torch.ones(4, device='cuda'),\n"
        "def fn(x):\n    return x + 1\n"
        "print(graph_tests.check(fn, make).why)\n"
    )
    path = ":".join(p for p in sys.path if p)
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": path, "PATH": "/usr/bin:/bin"},
        timeout=120,
    )
    assert '__name__ == "__main__"' in done.stdout, done.stdout + done.stderr
