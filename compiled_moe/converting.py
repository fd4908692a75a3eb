"""MXFP4 experts to NVFP4 in ModelOpt's layout without losing a bit: codes stay, scales convert, the rest is copied."""

from __future__ import annotations

from collections.abc import Callable

import torch

from nvfp4 import NVFP4Error

from .checkpoint import Checkpoint
from .errors import CheckpointError
from .shards import Reader
from .writing import ShardWriter, modelopt_config

_COPIED = ("F64", "F32", "F16", "BF16", "I64", "I32", "BOOL")


def convert(
    checkpoint: Checkpoint, open_writer: Callable[[], ShardWriter], progress: Callable[[int, int], None] | None = None
) -> None:
    """Write a weight-only NVFP4 checkpoint whose dequantised values are those of the source, bit for bit.

    Args:
        checkpoint: of MXFP4. open_writer: called once the source is known to convert.
        progress: called with bytes done and bytes in all, of the source.

    Raises:
        CheckpointError: no MXFP4, scales that do not convert without loss, or other tensors that are quantised too.
    """
    if checkpoint.quantization.algorithm != "MXFP4":
        raise CheckpointError(f"{checkpoint.path} is {checkpoint.quantization.algorithm} already; nothing to quantise")
    consumed = {part.header.key for layer in checkpoint.layers for part in layer.parts}
    rest = [header for key, header in checkpoint.headers.items() if key not in consumed]
    foreign = [header for header in rest if header.dtype not in _COPIED]
    if foreign:
        raise CheckpointError(
            f"{foreign[0].source} is {foreign[0].dtype}; only checkpoints whose other tensors are plain floats are "
            "converted, since ModelOpt's layout has one algorithm beside them"
        )
    writer, reader = open_writer(), Reader()
    done, total = 0, checkpoint.tensor_bytes
    for layer in checkpoint.layers:
        for part in layer.parts:
            try:
                values = part.read(reader)
            except NVFP4Error as error:
                raise CheckpointError(str(error)) from error
            for tensor, value in values:
                key = f"{layer.name}.{part.expert}.{part.projection}.{tensor}"
                scale = tensor == "weight_scale"
                writer.add(key, value.contiguous().view(torch.float8_e4m3fn) if scale else value)
        done += sum(h.nbytes for h in {part.header.key: part.header for part in layer.parts}.values())
        if progress is not None:
            progress(done, total)
    for header in rest:
        writer.add(header.key, reader.get(header))
    ignored = sorted({header.key.rpartition(".")[0] for header in rest if len(header.shape) == 2})
    writer.close(modelopt_config(checkpoint.config, ignored, weight_only=True))
