"""The command line, run in this process."""

import sys

import pytest

from compiled_moe import cli


def run(capsys, monkeypatch, *arguments):
    """Exit code, stdout and stderr of ``compiled-moe`` with these arguments; a traceback never."""
    monkeypatch.setattr(sys, "argv", ["compiled-moe", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    out = capsys.readouterr()
    assert "Traceback" not in out.err
    return end.value.code, out.out, out.err
