"""Which tile serves which batch: data and a pure function of shapes."""

from __future__ import annotations

import functools
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .compile import Tile

TABLE = Path(__file__).with_name("tiles.json")
FEW = 32
"""Slots up to which every block of a split tile sorts the routing for itself."""


@functools.cache
def table(path: Path = TABLE) -> tuple[dict[str, Tile], list[dict]]:
    """Named tiles, and rules in order: the first whose limits hold says the tile.

    Rules have ``tile`` and any of these upper limits: ``slots`` routed rows in all, ``mean`` of them per expert, and
    ``weights`` in one expert.
    """
    data = json.loads(path.read_text())
    return {name: from_json(tile) for name, tile in data["tiles"].items()}, data["rules"]


def from_json(tile: dict[str, Any]) -> Tile:
    """A tile from what ``as_json`` makes of it."""
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in tile.items()}
    return Tile(**values)


@functools.cache
def choose(slots: int, experts: int, hidden: int, inter: int) -> Tile:
    """The tile for ``slots`` routed rows over ``experts``, weights [2 inter, hidden] and [hidden, inter]."""
    tiles, rules = table()
    facts = {"slots": slots, "mean": slots / experts, "weights": 3 * hidden * inter}
    for rule in rules:
        if all(facts[name] <= rule[name] for name in facts if name in rule):
            return tiles[rule["tile"]]
    raise AssertionError(f"{TABLE.name} has no rule without limits")


def as_json(tile: Tile) -> dict:
    """A tile as the table holds it, without what equals the default."""
    defaults = asdict(Tile(8, (8,), 1, 2, 1, 2))
    return {
        k: v
        for k, v in asdict(tile).items()
        if k in ("tokens", "widths", "warpgroups", "blocks", "depth", "stages") or v != defaults[k]
    }
