"""Engines that run models through these layers; each is imported only when it is asked for."""

from __future__ import annotations

from ..errors import MachineError


def register_transformers(
    precision: str = "w4a16",
    policy: str = "raise",
    repairs: tuple[str, ...] = (),
    methods: tuple[str, ...] = ("modelopt", "compressed-tensors", "mxfp4"),
) -> None:
    """Let transformers' ``from_pretrained`` read NVFP4 checkpoints through this package, until it is called again.

    Experts stay packed and run on ``torch.ops.nvfp4.moe``, dense NVFP4 layers on ``torch.ops.nvfp4.linear``; every
    scale is checked before anything else is loaded. Other checkpoints of the same ``quant_method`` stay transformers'.

    Args:
        precision, policy, repairs: see ``nvfp4.finalize``.
        methods: values of ``quant_method`` to look at.

    Raises:
        MachineError: transformers is not installed.
    """
    try:
        from . import transformers
    except ModuleNotFoundError as error:
        raise MachineError("loading models needs transformers: pip install 'compiled-moe[hf]'") from error
    transformers.register(transformers.Rules(precision, policy, tuple(repairs)), methods)
