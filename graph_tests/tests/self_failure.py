"""Callables that break the one who judges them: the tool must say so and go on."""

from __future__ import annotations

import time

import torch

from graph_tests.tests.faulty import make


def hang(x, ids):
    while True:
        time.sleep(0.05)


def out_of_bounds(x, ids):
    return x[ids.flatten() + 1_000_000]


def raises_at_16(x, ids):
    if x.shape[0] == 16:
        raise ValueError("sixteen rows are not supported")
    return x * 2


def many_launches(x, ids):
    for _ in range(3000):
        x = x + 1
    return x


def retried_captures(x, ids):
    """Refuted, and only in a capture: it allocates and then waits."""
    y = x.repeat(64, 1) * 2
    if torch.cuda.is_current_stream_capturing():
        y.sum().item()
    return y


make_plain = make
