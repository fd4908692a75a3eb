"""vLLM's entry point: what ``vllm.general_plugins`` calls in every process; vllm is imported only then.

COMPILED_MOE_VLLM is a comma-separated list: "guard" checks scales in front of vLLM's own NVFP4 experts, "take-over" or
"take-over=PRECISION" serves NVFP4 checkpoints here though no --quantization asks for it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from nvfp4.format import PRECISIONS

from ...errors import CompiledMoeError

VARIABLE = "COMPILED_MOE_VLLM"


@dataclass(frozen=True)
class Options:
    """What COMPILED_MOE_VLLM asks for."""

    guard: bool = False
    take_over: str | None = None

    @classmethod
    def read(cls, text: str) -> Options:
        """Parse the variable.

        Raises:
            CompiledMoeError: an unknown word; a typing error must not serve unguarded.
        """
        guard, take_over = False, None
        for word in filter(None, (w.strip() for w in text.split(","))):
            name, _, precision = word.partition("=")
            if word == "guard":
                guard = True
            elif name == "take-over" and (precision or "w4a16") in PRECISIONS:
                take_over = precision or "w4a16"
            else:
                raise CompiledMoeError(
                    f"{VARIABLE} holds {word!r}; known are guard, take-over, and take-over= with one of "
                    f"{', '.join(PRECISIONS)}"
                )
        return cls(guard, take_over)


def register() -> None:
    """Make ``--quantization compiled-moe`` known to vLLM, and what COMPILED_MOE_VLLM asks for; may be called again."""
    options = Options.read(os.environ.get(VARIABLE, ""))
    from .config import register as register_methods

    register_methods(options.take_over)
    if options.guard:
        from .guard import install

        install()
