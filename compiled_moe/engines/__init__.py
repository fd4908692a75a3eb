"""Engines that run models through these layers; each is imported only when it is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import MachineError

_NEEDS_TRANSFORMERS = "loading models needs transformers: pip install 'compiled-moe[hf]'"


def register_transformers(
    precision: str = "w4a16",
    policy: str = "raise",
    repairs: tuple[str, ...] = (),
    methods: tuple[str, ...] = ("modelopt", "compressed-tensors", "mxfp4"),
    device: str | None = None,
) -> None:
    """Let transformers' ``from_pretrained`` read NVFP4 checkpoints through this package, until it is called again.

    Experts stay packed and run on ``torch.ops.nvfp4.moe``, dense NVFP4 layers on ``torch.ops.nvfp4.linear``; every
    scale is checked before anything else is loaded. Other checkpoints of the same ``quant_method`` stay transformers'.

    Args:
        precision, policy, repairs: see ``nvfp4.finalize``.
        methods: values of ``quant_method`` to look at; none at all leaves transformers as it was.
        device: where quantised layers are finalized, and laid out for its kernels, when ``from_pretrained`` gets no
            ``device_map``; move the rest there with ``.to(device)``. Without both, transformers loads to the CPU.

    Raises:
        MachineError: transformers is not installed.
    """
    try:
        from . import transformers
    except ModuleNotFoundError as error:
        raise MachineError(_NEEDS_TRANSFORMERS) from error
    transformers.register(transformers.Rules(precision, policy, tuple(repairs), device), methods)


def quantization_config(folder: str | Path) -> Any:
    """For ``from_pretrained(folder, quantization_config=...)``, where only hf_quant_config.json says what it holds.

    Raises:
        MachineError: transformers is not installed. CheckpointError: no such file, or another quantisation.
    """
    try:
        from . import transformers
    except ModuleNotFoundError as error:
        raise MachineError(_NEEDS_TRANSFORMERS) from error
    return transformers.said_by(Path(folder))
