"""The activations, on physical values (after the global scales and the bias), in float32."""

import triton
import triton.language as tl

SILU = tl.constexpr(0)
SWIGLUOAI = tl.constexpr(1)
SWIGLUSTEP = tl.constexpr(2)
GELU = tl.constexpr(3)
GELU_TANH = tl.constexpr(4)
RELU2 = tl.constexpr(5)


@triton.jit
def sigmoid(v):
    """1 / (1 + exp(-v)), finite for every finite v."""
    z = tl.exp(-tl.abs(v))
    return tl.where(v >= 0, 1.0, z) / (1.0 + z)


@triton.jit
def clamp_above(v, top):
    """min(v, top), keeping NaN."""
    return tl.where(v > top, top, v)


@triton.jit
def clamp_both(v, top):
    """V within +-top, keeping NaN."""
    return tl.where(v > top, top, tl.where(v < -top, -top, v))


@triton.jit
def activate(g, u, alpha, beta, limit, KIND: tl.constexpr, LIMITED: tl.constexpr):
    """act(g, u); u is ignored by relu2. alpha and beta belong to swigluoai, limit to the clamped forms."""
    if KIND == SILU:
        if LIMITED:
            g = clamp_above(g, limit)
            u = clamp_both(u, limit)
        out = g * sigmoid(g) * u
    elif KIND == SWIGLUOAI:
        if LIMITED:
            g = clamp_above(g, limit)
            u = clamp_both(u, limit)
        out = g * sigmoid(alpha * g) * (u + beta)
    elif KIND == SWIGLUSTEP:
        out = g * sigmoid(g)
        if LIMITED:
            out = clamp_above(out, limit)
            u = clamp_both(u, limit)
        out = out * u
    elif KIND == GELU:
        out = 0.5 * g * (1.0 + tl.erf(g * 0.7071067811865476)) * u
    elif KIND == GELU_TANH:
        t = 0.7978845608028654 * (g + 0.044715 * g * g * g)
        out = g * sigmoid(2.0 * t) * u
    else:
        out = tl.where(g > 0, g * g, tl.where(g <= 0, 0.0, g))
    return out
