"""Which tile serves which batch: data and a pure function of shapes."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from .compile import Tile

TABLE = Path(__file__).with_name("tiles.json")
FEW = 32
"""Slots up to which every block of a split tile sorts the routing for itself."""


@functools.cache
def table(path: Path = TABLE) -> tuple[dict[str, Tile], list[dict]]:
    """Named tiles, and rules in order: the first whose limits hold says the tile.

    Rules have ``tile`` and any of these upper limits: ``slots`` routed rows in all, ``mean`` of them per expert,
    ``weights`` in one expert, ``experts`` (few of them fill the machine only with lower tiles).
    """
    data = json.loads(path.read_text())
    return {name: _tile(values) for name, values in data["tiles"].items()}, data["rules"]


def _tile(values: dict[str, Any]) -> Tile:
    arguments: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    return Tile(**arguments)


@functools.cache
def choose(slots: int, experts: int, hidden: int, inter: int) -> Tile:
    """The tile for ``slots`` routed rows over ``experts``, weights [2 inter, hidden] and [hidden, inter]."""
    tiles, rules = table()
    facts = {"slots": slots, "mean": slots / experts, "weights": 3 * hidden * inter, "experts": experts}
    for rule in rules:
        if all(facts[name] <= rule[name] for name in facts if name in rule):
            return tiles[rule["tile"]]
    raise AssertionError(f"{TABLE.name} has no rule without limits")
