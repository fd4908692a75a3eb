"""Callables with one known fault each. A line that ends in ``#`` is the line that the prover must name.

M=64, H=256, E=8, k=2: x [M, H], ids [M, k], w [H, H]. Kernels launched by hand are in faulty_kernels.py, custom
operators in faulty_ops.py.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

M, H, E, K = 64, 256, 8, 2


def make(seed: int, size: int = M):
    """x, ids: same shapes for every seed, other values, other routing."""
    g = torch.Generator(device="cuda").manual_seed(seed)
    x = torch.randn(size, H, device="cuda", generator=g)
    ids = torch.randint(0, E, (size, K), device="cuda", generator=g)
    return x, ids


def make_w(seed: int, size: int = M):
    """x, ids, w."""
    g = torch.Generator(device="cuda").manual_seed(seed + 100)
    return *make(seed, size), torch.randn(H, H, device="cuda", generator=g)


def make_square(seed: int):
    """One well-conditioned matrix."""
    g = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(32, 32, device="cuda", generator=g) + 40 * torch.eye(32, device="cuda")


def item(x, ids):
    s = x.abs().amax().item()  #
    return x / s


def tolist(x, ids):
    n = torch.bincount(ids.flatten(), minlength=8).tolist()  #
    rows = x.repeat_interleave(K, dim=0)[torch.argsort(ids.flatten(), stable=True)]
    return torch.cat([part.sum(0, keepdim=True) for part in rows.split(n)])


def loop(x, ids):
    out = torch.zeros_like(x)
    for e in range(E):
        rows, _ = torch.where(ids == e)  #
        out.index_add_(0, rows, x.index_select(0, rows) * (e + 1))
    return out


def mask_put(x, ids):
    x = x.clone()
    x[x > 0] = x.mean()  #
    return x


def literal(x, ids):
    return x * torch.tensor([1.0] * H, device=x.device)  #


def one_hot(x, ids):
    return F.one_hot(ids.flatten())  #


def equal(x, w):
    assert torch.equal(x, w), "x and w differ"  #
    return x + w


def inverse(a):
    return torch.linalg.inv(a)  #


def sync(x, ids):
    y = x * 2
    torch.cuda.synchronize()  #
    return y


class LateRead:
    """Reads, without waiting, what an earlier call copied to pinned memory."""

    def __init__(self):
        self.host = torch.zeros(E, pin_memory=torch.cuda.is_available())

    def __call__(self, x, ids):
        totals = torch.zeros(E, device=x.device).index_add_(0, ids[:, 0], x[:, 0].abs())
        self.host.copy_(totals, non_blocking=True)  #
        return x * float(self.host[0])


def unjoined(x, ids):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.sin()  #
    return x * 2


class Counter:
    """Keeps its state on the host."""

    def __init__(self):
        self.n = 0

    def __call__(self, x, ids):
        self.n += 1
        return x * self.n  #


SCALE = torch.tensor(1.0)


def make_scaled(seed: int):
    """Inputs, and a CPU scalar that changes with them."""
    SCALE.fill_(1.0 + seed)
    return make(seed)


def cpu_scalar(x, ids):
    return x * SCALE  #


class Freed:
    """Outside captures it replaces the tensor that a captured graph goes on reading."""

    def __init__(self):
        self.bias = None

    def __call__(self, x, ids):
        if self.bias is None or not torch.cuda.is_current_stream_capturing():
            self.bias = torch.full((4096, H), 3.0, device=x.device)
        return x + self.bias[:1]  #


class Accumulate:
    """Adds to what earlier calls left."""

    def __init__(self):
        self.acc = None

    def __call__(self, x, ids):
        if self.acc is None:
            self.acc = torch.zeros(E, H, device=x.device)
        self.acc.index_add_(0, ids[:, 0], x)  #
        return self.acc


class Workspace:
    """Returns a view of the buffer that the next call writes."""

    def __init__(self):
        self.buffer = None

    def __call__(self, x, ids):
        if self.buffer is None:
            self.buffer = torch.empty(2 * M, H, device=x.device)
        torch.mul(x, 2, out=self.buffer[: x.shape[0]])  #
        return self.buffer[: x.shape[0]]


def tail(x, ids):
    """Rows of unused experts are never written, and read all the same."""
    table = torch.empty(E, H, device=x.device)
    table.index_copy_(0, ids[:, 0] % (1 + ids[0, 0]), torch.ones_like(x))
    return table


def mutated(x, ids):
    return x.mul_(2)  #
