"""e2m1 and e4m3 in integer arithmetic: exact on every architecture and in Triton's interpreter.

The float16 bit patterns do the work: shifted into a float16, an e2m1 code reads as its value * 2^-14 and an e4m3 byte
as its value * 2^-8, subnormals included, and float16 to float32 is exact everywhere. The hardware type fp8e4nv does
not exist on sm_80, and the interpreter decodes its 0x7F as 480.
"""

import triton
import triton.language as tl


@triton.jit
def decode_e2m1(nibble):
    """Codes 0..15 (any integer type) to float32."""
    n = nibble.to(tl.uint16)
    bits = ((n & 8) << 12) | ((n & 7) << 9)
    return bits.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@triton.jit
def decode_e4m3(byte):
    """Bytes to float32; 0x7F and 0xFF are NaN."""
    b = byte.to(tl.uint16)
    bits = ((b & 0x80) << 8) | ((b & 0x7F) << 7)
    value = bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where((b & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def encode_e4m3(value):
    """Float32 in [0, inf) to the nearest byte, ties to even, saturating at 448."""
    v = tl.minimum(value, 448.0)
    # 2^14 has a unit in the last place of 2^-9, the step of the subnormals: the sum's low bits are the byte.
    small = (v + 16384.0).to(tl.int32, bitcast=True) & 0xFF
    bits = v.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    return tl.where(v < 0.015625, small, normal)


@triton.jit
def encode_e2m1(value):
    """Float32 to codes 0..15, nearest, ties to the even code, saturating at 6; -0 keeps its sign."""
    a = tl.abs(value)
    code = (a > 0.25).to(tl.int32) + (a >= 0.75).to(tl.int32) + (a > 1.25).to(tl.int32) + (a >= 1.75).to(tl.int32)
    code += (a > 2.5).to(tl.int32) + (a >= 3.5).to(tl.int32) + (a > 5.0).to(tl.int32)
    return code | ((value.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def is_finite(value):
    """Neither NaN nor infinite."""
    return tl.abs(value) < float("inf")


@triton.jit
def global_scale_of(amax):
    """Amax / 2688, or zero below the smallest normal float32."""
    scale = tl.div_rn(amax, 2688.0)
    return tl.where(scale < 1.1754943508222875e-38, 0.0, scale)


@triton.jit
def quantize_blocks(x, g):
    """Quantise blocks x [..., 16] in float32 with global scale g, of shape [..., 1] with one axis less than x.

    Returns codes 0..15 (int32, x's shape) and scale bytes (int32, without the last axis). Same rules as
    ``format.quantize_blocks``.
    """
    amax = tl.max(tl.abs(x), axis=-1)
    g = g + tl.zeros_like(amax)
    unusable = ((g != 0.0) & ((g < 1.1754943508222875e-38) | (g == float("inf")))) | (g != g)
    bad = tl.max((tl.abs(x) == float("inf")).to(tl.int32) | (x != x).to(tl.int32), axis=-1)
    fault = (bad + unusable.to(tl.int32)) > 0
    quiet = fault | (g == 0.0) | (amax == 0.0)
    ratio = tl.div_rn(tl.where(quiet, 0.0, amax), tl.where(quiet, 1.0, 6.0 * g))
    byte = encode_e4m3(ratio)
    step = tl.where(quiet, 0.0, decode_e4m3(byte) * g)
    live = step > 0.0
    q = tl.div_rn(tl.where(tl.expand_dims(live, -1), x, 0.0), tl.expand_dims(tl.where(live, step, 1.0), -1))
    codes = tl.where(tl.expand_dims(live, -1), encode_e2m1(q), 0)
    return codes, tl.where(fault, 0x7F, byte)


@triton.jit
def decode_tile(codes, scales, N: tl.constexpr, K: tl.constexpr):
    """Packed codes [N, K/2] and scale bytes [N, K/16] to float32 [N, K], without the global scale."""
    values = tl.reshape(tl.join(decode_e2m1(codes & 15), decode_e2m1(codes >> 4)), (N, K // 16, 16))
    return tl.reshape(values * tl.expand_dims(decode_e4m3(scales), 2), (N, K))
