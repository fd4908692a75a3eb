"""The ``compiled-moe`` command. Exit codes: 0 fine, 1 findings, 2 usage, 3 this machine cannot."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from .errors import CompiledMoeError, MachineError

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None,
    help="NVFP4 mixture-of-experts models that compile, capture into CUDA graphs and never sync.",
)  # fmt: skip


@app.callback()
def _root() -> None:
    """Keep subcommands subcommands."""


@app.command()
def generate(
    model: Annotated[
        str | None, typer.Argument(help="checkpoint folder or hub id; the shipped model by default")
    ] = None,
    prompt: Annotated[str, typer.Option(help="text to continue")] = "def ",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="tokens to write")] = 256,
    precision: Annotated[str, typer.Option(help="w4a16, w4a4_per_token or w4a4_static")] = "w4a16",
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy")] = 0.0,
    seed: Annotated[int, typer.Option(help="of the sampling")] = 0,
    device: Annotated[str | None, typer.Option(help="cuda or cpu; default cuda where there is one")] = None,
    dtype: Annotated[str | None, typer.Option(help="of all but the experts: bfloat16, float16 or float32")] = None,
    policy: Annotated[str, typer.Option(help="on bad scales: raise, report or unchecked (dummy weights)")] = "raise",
    repair: Annotated[list[str] | None, typer.Option(help="opt-in repair of scales; may be given again")] = None,
    compile: Annotated[bool, typer.Option(help="compile the decode step")] = True,
    health: Annotated[bool, typer.Option(help="count what passes each layer, inside the graphs")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON document on stdout, text on stderr")] = False,
) -> None:
    """Load a checkpoint, check its scales, compile, and write text."""
    from .generate import Request, run

    run(
        Request(
            model=model, prompt=prompt, max_new_tokens=max_new_tokens, precision=precision, temperature=temperature,
            seed=seed, device=device, dtype=dtype, policy=policy, repairs=tuple(repair or ()), compile=compile,
            health=health,
        ),
        as_json=as_json,
    )  # fmt: skip


@app.command()
def inspect(
    folder: Annotated[str, typer.Argument(help="checkpoint folder")],
    precision: Annotated[
        str | None, typer.Option(help="what to check for; default w4a4_static where there are activation scales")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON document on stdout, text on stderr")] = False,
    plot: Annotated[Path | None, typer.Option(help="write block scales and maps of global scales: .png, .pdf")] = None,
    html: Annotated[Path | None, typer.Option(help="write one self-contained page")] = None,
    codes: Annotated[bool, typer.Option("--codes", help="count the codes too, which reads all weights")] = False,
) -> None:
    """Look at every scale of a checkpoint, without a GPU or a model; exit code 1 where one is refused."""
    from .inspection import Request, run

    raise typer.Exit(run(Request(folder, precision, codes, plot, html), as_json=as_json))


@app.command()
def quantize(
    source: Annotated[Path, typer.Argument(help="folder of a model in bfloat16, or in MXFP4")],
    out: Annotated[Path, typer.Option(help="folder to write; must hold no checkpoint")],
    calibrate: Annotated[Path | None, typer.Option(help="text that the activation scales are measured on")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="tokens of the text to use")] = 16384,
    window: Annotated[int, typer.Option(min=1, help="tokens in one forward pass")] = 512,
    activation: Annotated[
        str | None, typer.Option(help="activation scales: per_expert (the default), layer_max or none (weight-only)")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cuda or cpu; default cuda where there is one")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON document on stdout, text on stderr")] = False,
) -> None:
    """Write a checkpoint in NVFP4 (ModelOpt's layout) and look at every scale of it."""
    from .quantizing import Request, run

    raise typer.Exit(run(Request(source, out, calibrate, tokens, window, activation, device), as_json=as_json))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="checkpoint folder or hub id, before vLLM's own options")],
    precision: Annotated[str, typer.Option(help="w4a16, w4a4_per_token or w4a4_static")] = "w4a16",
) -> None:
    """Start vLLM's OpenAI server on a checkpoint; all other options are vLLM's own."""
    from .engines.serve import run

    run(model, precision, context.args)


@app.command()
def env(as_json: Annotated[bool, typer.Option("--json", help="one JSON document")] = False) -> None:
    """Say what this machine has: versions, device, compiler, extras."""
    facts = environment()
    print(json.dumps(facts, indent=2) if as_json else "\n".join(f"{name}: {value}" for name, value in facts.items()))


def environment() -> dict:
    """Facts that a fault report needs."""
    import torch

    import nvfp4.native

    def version(package: str) -> str | None:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return None

    cuda = torch.cuda.is_available()
    packages = ("compiled-moe", "torch", "triton", "transformers", "safetensors", "cuda-bindings", "numpy")
    return {
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "capability": ".".join(map(str, torch.cuda.get_device_capability())) if cuda else None,
        "cuda": torch.version.cuda,
        "cpu threads": torch.get_num_threads(),
        "c++ compiler": next((c for c in ("g++", "clang++", "c++") if shutil.which(c)), None),
        "cpu kernel": nvfp4.native.build().why,
    }


def main() -> None:
    """Run the command; a user's mistake is one sentence, never a traceback."""
    from nvfp4 import NVFP4Error, ScaleError

    try:
        code = app(standalone_mode=False)
    except ScaleError as error:
        code = _say(f"refused: {error}", 1)
    except MachineError as error:
        code = _say(f"error: {error}", 3)
    except (CompiledMoeError, NVFP4Error) as error:
        code = _say(f"error: {error}", 2)
    except KeyboardInterrupt:
        code = _say("interrupted", 130)
    except Exception as error:
        # typer's own usage errors, whichever click it was built on; anything else is a fault of ours and stays loud.
        if not hasattr(error, "exit_code") or not hasattr(error, "format_message"):
            raise
        code = _say(f"error: {error.format_message()} (compiled-moe --help)", error.exit_code)
    sys.exit(code or 0)


def _say(text: str, code: int) -> int:
    print(f"compiled-moe: {text}", file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
