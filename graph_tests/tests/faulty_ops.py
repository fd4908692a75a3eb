"""Custom operators with one known fault each, and the callables that use them."""

from __future__ import annotations

import torch

SPACE = "graph_tests_faulty"


@torch.library.custom_op(f"{SPACE}::opaque", mutates_args=())
def opaque_op(x: torch.Tensor) -> torch.Tensor:
    return x / float(x.abs().amax())


@opaque_op.register_fake
def _(x):
    return torch.empty_like(x)


@torch.library.custom_op(f"{SPACE}::hidden_write", mutates_args=())
def hidden_write_op(x: torch.Tensor) -> torch.Tensor:
    x.mul_(0.5)
    return x + 1


@hidden_write_op.register_fake
def _(x):
    return torch.empty_like(x)


@torch.library.custom_op(f"{SPACE}::fake_width", mutates_args=())
def fake_width_op(x: torch.Tensor) -> torch.Tensor:
    return x.new_ones((x.shape[0], 2880))


@fake_width_op.register_fake
def _(x):
    return x.new_empty((x.shape[0], 3072))


@torch.library.custom_op(f"{SPACE}::fake_int", mutates_args=())
def fake_int_op(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@fake_int_op.register_fake
def _(x):
    return x.new_empty((int(x.shape[0]), x.shape[1]))


_seen: dict[torch.device, torch.Tensor] = {}


@torch.library.custom_op(f"{SPACE}::vanishes", mutates_args=())
def vanishes_op(x: torch.Tensor) -> None:
    if x.device not in _seen:
        _seen[x.device] = torch.zeros((), device=x.device)
    _seen[x.device].copy_(x.abs().amax())


@vanishes_op.register_fake
def _(x):
    return None


@torch.library.custom_op(f"{SPACE}::no_graphs", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def no_graphs_op(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@no_graphs_op.register_fake
def _(x):
    return torch.empty_like(x)


def opaque(x, ids):
    return opaque_op(x)


def hidden_write(x, ids):
    return hidden_write_op(x)  #


def fake_width(x, ids):
    return fake_width_op(x)  #


def fake_int(x, ids):
    return fake_int_op(x)  #


def vanishes(x, ids):
    vanishes_op(x)  #
    return x * 2


def no_graphs(x, ids):
    return no_graphs_op(x)
