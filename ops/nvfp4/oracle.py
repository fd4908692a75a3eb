"""The dumb oracle: plain Python loops over float64 numbers, sharing no line and no table with any kernel.

Slow on purpose. Tests compare everything else with it on small shapes.
"""

from __future__ import annotations

import math

import numpy as np


def decode_scale(byte: int) -> float:
    """One e4m3 byte by the definition: sign, 4 exponent bits with bias 7, 3 mantissa bits."""
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa / 8 * 2.0**-6
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def decode_code(code: int) -> float:
    """One e2m1 code by the definition: sign, 2 exponent bits with bias 1, 1 mantissa bit."""
    sign = -1.0 if code & 8 else 1.0
    exponent, mantissa = (code >> 1) & 3, code & 1
    return sign * (mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1))


def nearest(value: float, table: list[float]) -> int:
    """Index of the nearest entry, ties to the even index."""
    return min(range(len(table)), key=lambda i: (abs(table[i] - value), i % 2))


def quantize_row(row: list[float], global_scale: float) -> tuple[list[int], list[int]]:
    """Codes (one a number) and scale bytes of one row; float32 rounding where the format prescribes it."""
    f32 = np.float32
    magnitudes = [decode_code(c) for c in range(8)]
    scales = [decode_scale(b) for b in range(0x7F)]
    codes: list[int] = []
    scale_bytes: list[int] = []
    g = f32(global_scale)
    for start in range(0, len(row), 16):
        block = [f32(v) for v in row[start : start + 16]]
        if not all(math.isfinite(v) for v in block):
            scale_bytes.append(0x7F)
            codes += [0] * 16
            continue
        amax = max(abs(v) for v in block)
        ratio = 0.0 if amax == 0 or g == 0 else float(f32(amax / f32(f32(6) * g)))
        byte = nearest(min(ratio, 448.0), scales)
        step = f32(f32(scales[byte]) * g)
        scale_bytes.append(byte)
        for v in block:
            if step == 0:
                codes.append(0)
            else:
                q = float(f32(v / step))
                codes.append(nearest(abs(q), magnitudes) + (8 if math.copysign(1.0, q) < 0 else 0))
    return codes, scale_bytes


def dequantize_row(codes: list[int], scale_bytes: list[int], global_scale: float) -> list[float]:
    """Values of one row, in float64."""
    return [decode_code(c) * decode_scale(scale_bytes[i // 16]) * global_scale for i, c in enumerate(codes)]


def activate(name: str, g: float, u: float, alpha: float = 1.0, beta: float = 0.0, limit: float | None = None) -> float:
    """One gated activation value, straight from its formula."""
    top = math.inf if limit is None else limit
    clamp = lambda v: max(-top, min(top, v))  # noqa: E731
    sigmoid = lambda v: 1 / (1 + math.exp(-v)) if v > -700 else 0.0  # noqa: E731
    if name == "silu":
        g = min(g, top)
        return g * sigmoid(g) * clamp(u)
    if name == "swigluoai":
        g = min(g, top)
        return g * sigmoid(alpha * g) * (clamp(u) + beta)
    if name == "swiglustep":
        return min(g * sigmoid(g), top) * clamp(u)
    if name == "gelu":
        return 0.5 * g * (1 + math.erf(g / math.sqrt(2))) * u
    if name == "gelu_tanh":
        return 0.5 * g * (1 + math.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3))) * u
    if name == "relu2":
        return max(g, 0.0) ** 2
    raise AssertionError(name)


def moe(x, ids, router_weights, w13, w13_global, w2, w2_global, activation="silu", **constants):
    """Weight-only MoE layer by three nested loops.

    Args:
        x: [M][H] numbers. ids, router_weights: [M][k]. w13: [E][N][H] and w2: [E][H][I] numbers *before* their global
            scales. w13_global: [E][2] (gate, up) or [E][1]. w2_global: [E].
    """
    out = []
    for row, row_ids, row_weights in zip(x, ids, router_weights, strict=True):
        y = [0.0] * len(row)
        for e, p in zip(row_ids, row_weights, strict=True):
            if not 0 <= e < len(w13):
                continue
            intermediate = len(w2[e][0])
            h = []
            for i in range(intermediate):
                g = sum(a * b for a, b in zip(row, w13[e][i], strict=True)) * w13_global[e][0]
                u = 0.0
                if activation != "relu2":
                    u = sum(a * b for a, b in zip(row, w13[e][intermediate + i], strict=True)) * w13_global[e][1]
                h.append(activate(activation, g, u, **constants))
            for n in range(len(y)):
                y[n] += p * w2_global[e] * sum(a * b for a, b in zip(h, w2[e][n], strict=True))
        out.append(y)
    return out
