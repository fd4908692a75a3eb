"""A layer of random codes: what we serve, what it must give, and how far a result may be from it."""

from __future__ import annotations

import functools
import time

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.shapes import Shape
from nvfp4 import ExpertWeights, RawExperts, dequantize, finalize

BANDS = {  # cosine, relative L2, |gain - 1|, worst token's cosine
    "w4a16": (0.9999, 0.01, 0.005, 0.9995),
    "w4a4_per_token": (0.98, 0.20, 0.05, 0.97),
    "w4a4_static": (0.98, 0.20, 0.05, 0.97),
}
CHECKED = 32
"""Tokens of a batch that are compared."""


class Layer:
    """Random codes and moderate scales, as a checkpoint has them, and the finalized weights made of them.

    Attributes:
        w13, s13, g13, w2, s2, g2: codes, block scales and global scales. weights: by precision, one memory for all.
        finalize_s: seconds that ``nvfp4.finalize`` took. shared: what peers made of the codes, by name.
    """

    def __init__(self, shape: Shape, device: str = "cuda", layout: str = "auto") -> None:
        self.shape, self.device = shape, device
        e, h, i = shape.experts, shape.hidden, shape.inter

        def random(low: int, high: int, *size: int) -> Tensor:
            return torch.randint(low, high, size, dtype=torch.uint8, device=device)

        self.w13, self.s13 = random(0, 256, e, 2 * i, h // 2), random(0x30, 0x40, e, 2 * i, h // 16)
        self.w2, self.s2 = random(0, 256, e, h, i // 2), random(0x30, 0x40, e, h, i // 16)
        self.g13 = torch.full((e, 2), 0.25 * h**-0.5, device=device)
        self.g2 = torch.full((e,), 0.25 * i**-0.5, device=device)
        self.shared: dict = {}
        self.weights = self._finalize(layout)

    def _finalize(self, layout: str) -> dict[str, ExpertWeights]:
        shape = self.shape
        raw = RawExperts(shape.experts, shape.hidden, shape.inter, device=self.device)
        values = {"w13": self.w13, "w13_block_scale": self.s13, "w13_global_scale": self.g13}
        values |= {"w2": self.w2, "w2_block_scale": self.s2, "w2_global_scale": self.g2}
        for name, value in values.items():
            raw.tensors[name].copy_(value)
        # A standard normal x stays under 5, h here under 6; 2688 = 6 * 448 is the largest number of NVFP4.
        raw.tensors["a13_scale"].fill_(5 / 2688)
        raw.tensors["a2_scale"].fill_(6 / 2688)
        self._wait()
        begin = time.perf_counter()
        static, _ = finalize(raw, "w4a4_static", policy="unchecked", layout=layout)
        self._wait()
        self.finalize_s = time.perf_counter() - begin
        others = {name: t for name, t in static.tensors.items() if name not in ("a13_scale", "a2_scale")}
        weights = {"w4a4_static": static}
        for precision in ("w4a16", "w4a4_per_token"):
            weights[precision] = ExpertWeights(static.spec, precision, static.layout, others, "unchecked", ())
        return weights

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def run(self, x: Tensor, ids: Tensor, router: Tensor, precision: str) -> Tensor:
        return self.weights[precision](x, ids, router)

    def expert(self, e: int) -> tuple[Tensor, Tensor]:
        """Dequantised w13 [2I, H] and w2 [H, I], float32."""
        inter = self.shape.inter
        scale = self.g13[e].repeat_interleave(inter).unsqueeze(1)
        return (
            dequantize(self.w13[e], self.s13[e], scale, torch.float32),
            dequantize(self.w2[e], self.s2[e], self.g2[e : e + 1], torch.float32),
        )

    @functools.cached_property
    def bfloat16(self) -> tuple[Tensor, Tensor]:
        """w13 [E, 2I, H] and w2 [E, H, I], dequantised and rounded."""
        e, h, i = self.shape.experts, self.shape.hidden, self.shape.inter
        w13 = torch.empty(e, 2 * i, h, dtype=torch.bfloat16, device=self.device)
        w2 = torch.empty(e, h, i, dtype=torch.bfloat16, device=self.device)
        for expert in range(e):
            for out, value in zip((w13, w2), self.expert(expert), strict=True):
                out[expert] = value
        return w13, w2

    def reference(self, x: Tensor, ids: Tensor, router: Tensor) -> Tensor:
        """float32, one expert at a time; h rounded to x's dtype as the operator does."""
        out = torch.zeros(x.shape, device=x.device)
        for e in ids.unique().tolist():
            token, j = torch.where(ids == e)
            w13, w2 = self.expert(e)
            g, u = (x[token].float() @ w13.T).chunk(2, dim=1)
            h = (F.silu(g) * u).to(x.dtype).float()
            out.index_add_(0, token, (h @ w2.T) * router[token, j].unsqueeze(1))
        return out


def measures(got: Tensor, want: Tensor) -> tuple[float, ...]:
    """Cosine, relative L2, gain (slope), worst token's cosine."""
    got, want = got.double(), want.double()
    cos = F.cosine_similarity(got.flatten(), want.flatten(), dim=0)
    gain = (got * want).sum() / (want * want).sum()
    return tuple(float(v) for v in (cos, (got - want).norm() / want.norm(), gain, F.cosine_similarity(got, want).min()))


class Reference:
    """The right answer for some tokens of a batch, spread over all of it; computed once for all that is compared."""

    def __init__(self, layer: Layer, x: Tensor, ids: Tensor, router: Tensor) -> None:
        count = min(CHECKED, x.shape[0])
        self.rows = torch.linspace(0, x.shape[0] - 1, count, device=x.device).round().long()
        self.want = layer.reference(x[self.rows], ids[self.rows], router[self.rows])

    def check(self, out: Tensor, precision: str) -> tuple[float, ...]:
        """Measures of a result for the whole batch.

        Raises:
            AssertionError: outside the bands; a wrong kernel has no time.
        """
        got = measures(out[self.rows], self.want)
        cos, l2, gain, worst = BANDS[precision]
        if not (got[0] >= cos and got[1] <= l2 and abs(got[2] - 1) <= gain and got[3] >= worst):
            raise AssertionError(f"{precision}: cosine, L2, gain, worst token are {got}, outside {BANDS[precision]}")
        return got
