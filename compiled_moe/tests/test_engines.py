"""What engines do before an engine is there: options, the command, and that importing them does nothing."""

import subprocess
import sys

import pytest

import compiled_moe
from compiled_moe.engines import serve
from compiled_moe.engines.vllm import Options


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("", Options()),
        ("guard", Options(guard=True)),
        (" guard , take-over", Options(guard=True, take_over="w4a16")),
        ("take-over=w4a4_per_token", Options(take_over="w4a4_per_token")),
    ],
)
def test_the_variable_is_read(text, options):
    assert Options.read(text) == options


@pytest.mark.parametrize("text", ("gaurd", "guard=1", "take-over=w4a8", "take_over"))
def test_a_typing_error_does_not_serve_unguarded(text):
    with pytest.raises(compiled_moe.CompiledMoeError, match="known are guard, take-over"):
        Options.read(text)


def test_the_command_line_of_the_server(monkeypatch):
    monkeypatch.setattr(serve.importlib.util, "find_spec", lambda name: object())
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    line = serve.command("M", "w4a4_per_token", ["--port", "81"])
    assert line[1:] == ["-m", "vllm.entrypoints.openai.api_server", "--model", "M", "--quantization",
                        "compiled-moe-w4a4-per-token", "--port", "81"]  # fmt: skip
    with pytest.raises(compiled_moe.CompiledMoeError, match="precision is 'w4'"):
        serve.command("M", "w4", [])
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    with pytest.raises(compiled_moe.MachineError, match="VLLM_PLUGINS is 'other'"):
        serve.command("M", "w4a16", [])
    monkeypatch.setenv("VLLM_PLUGINS", "other,compiled_moe")
    assert serve.command("M", "w4a16", [])[5:] == ["--quantization", "compiled-moe"]


def test_without_vllm_serve_says_so_in_one_line():
    hidden = "import sys; sys.modules['vllm'] = None; import importlib.util as u; find = u.find_spec; "
    hidden += "u.find_spec = lambda n, *a: None if n == 'vllm' else find(n, *a); "
    code = hidden + "sys.argv = ['compiled-moe', 'serve', 'M', '--port', '81']; import compiled_moe.cli as c; c.main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 3 and done.stdout == ""
    assert (
        done.stderr.count("\n") == 1 and "serving needs vLLM, which is not installed here: pip install" in done.stderr
    )


def test_naming_the_engines_imports_none_of_them():
    code = "import sys, compiled_moe.engines.vllm, compiled_moe.engines.serve; "
    code += "print({'vllm', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr
