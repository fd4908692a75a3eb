"""What a time is held against: the floor of its regime and the best peer of the same run. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from bench.shapes import Shape

LAUNCHES_US = 6.0
"""What a few dependent launches cost, where next to nothing is read: added to the floor of the smallest batches."""


@dataclass(frozen=True)
class Goal:
    """A regime: which share of the floor is asked for, how many times the best peer, and what is added to the floor."""

    regime: str
    fraction: float
    over_peer: float
    extra_us: float = 0.0


FEW = Goal("few tokens", 0.65, 1.2, LAUNCHES_US)
MEMORY = Goal("memory-bound", 0.85, 1.2)
CROSSOVER = Goal("crossover", 0.70, 1.5)
PREFILL = Goal("prefill", 0.80, 1.2)


def goal_of(shape: Shape, tokens: int) -> Goal:
    """The regime by tokens and by mean tokens per expert."""
    mean = tokens * shape.top_k / shape.experts
    if tokens < 16:
        return FEW
    if mean <= 32:
        return MEMORY
    return CROSSOVER if mean < 128 else PREFILL


def judge(goal: Goal, us: float, floor_us: float, peers: dict[str, float]) -> dict:
    """One time against its goal.

    Args:
        peers: their times at the same point. Where even the floor would not be ``over_peer`` times faster than the
            best of them, the share of the floor decides alone.
    """
    base = floor_us + goal.extra_us
    best = min(peers, key=lambda name: peers[name], default=None)
    ratio = None if best is None else peers[best] / us
    floor_met = base / us >= goal.fraction
    possible = best is None or peers[best] / goal.over_peer >= base
    peer_met = ratio is None or ratio >= goal.over_peer
    return {
        "regime": goal.regime,
        "goal": goal.fraction,
        "of_floor": floor_us / us,
        "of_goal_floor": base / us,
        "floor_met": floor_met,
        "best_peer": best,
        "over_peer": ratio,
        "over_peer_goal": goal.over_peer,
        "met": floor_met and (peer_met or not possible),
    }
