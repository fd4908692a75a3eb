"""The README is run, not trusted: its Python, its commands' names, and the files its numbers come from."""

import json
import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.S)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_python_blocks_run(number, capsys):
    pytest.importorskip("transformers")
    exec(compile(BLOCKS[number], f"README.md block {number}", "exec"), {})
    assert capsys.readouterr().out


def test_commands_named_exist():
    from typer.main import get_command

    from compiled_moe.cli import app

    known = set(getattr(get_command(app), "commands", ()))
    for line in re.findall(r"^(?:\$ )?(?:\S*/)?compiled-moe (.*)$", README, re.M):
        assert shlex.split(line)[0] in known, line


def test_result_files_named_exist_and_say_where_they_come_from():
    for name in re.findall(r"`(\w+\.json)`", README):
        (path,) = list(ROOT.glob(f"*/results/{name}"))
        result = json.loads(path.read_text())
        assert {"date", "commit"} <= set(result) and {"machine", "environment"} & set(result), name


def test_tables_are_those_of_the_result_files():
    from bench.tables import render

    assert render(README) == README, "run: python -m bench.tables"
