"""Ranges of the caching allocator: a graph's private pool, and memory that nobody owns."""

from __future__ import annotations

from typing import Any

import torch

from graph_tests.layers.driver import fill

NANS, SMALL = 0xFF, 0x3C  # NaN (or -1) in every float and integer type; 0.0115 in bfloat16 and float32


def pool_ranges(pool: Any) -> list[tuple[int, int]]:
    """(address, bytes) of every block of one private pool, whether in use or not."""
    wanted = tuple(pool)
    return [
        (int(block["address"]), int(block["size"]))
        for segment in _segments()
        if tuple(segment["segment_pool_id"]) == wanted
        for block in segment["blocks"]
    ]


def free_ranges() -> list[tuple[int, int]]:
    """(address, bytes) of every block of the ordinary pools that is free."""
    return [
        (int(block["address"]), int(block["size"]))
        for segment in _segments()
        if tuple(segment["segment_pool_id"]) == (0, 0)
        for block in segment["blocks"]
        if block["state"] == "inactive"
    ]


def poison(ranges: list[tuple[int, int]], byte: int = NANS) -> None:
    """Overwrite ranges with one byte value, and wait."""
    torch.cuda.synchronize()
    fill(ranges, byte)


def _segments() -> list[dict[str, Any]]:
    device = torch.cuda.current_device()
    return [s for s in torch.cuda.memory_snapshot() if s["device"] == device]
