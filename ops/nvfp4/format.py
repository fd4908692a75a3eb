"""NVFP4: the numbers. e2m1 codes, one e4m3 scale for 16 codes, one float32 global scale that multiplies on decode.

Everything else in this package calls these facts; nothing re-derives them. The codecs here are vectorised torch and
exact: the CPU kernels and the reference of the Triton ones.

Source: OCP Microscaling Formats v1.0 (e2m1); OCP 8-bit Floating Point v1.0 (e4m3, "fn": no infinities).
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 16
"""Codes that share one block scale, along K."""
E2M1_MAX = 6.0
E4M3_MAX = 448.0
GLOBAL_DIVISOR = E2M1_MAX * E4M3_MAX
"""A tensor of absolute maximum ``amax`` gets global scale ``amax / 2688``."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of the codes 0..7; code + 8 is the negative."""
NAN_SCALE = 0x7F
"""Block scale byte of a block that held a non-finite value: it decodes to NaN, so the fault stays visible."""
FLOAT32_MIN_NORMAL = 2.0**-126

PRECISIONS = ("w4a16", "w4a4_static", "w4a4_per_token")
"""Activations as they come, quantised with scales of the checkpoint, or with one scale per token made on the device."""
ACTIVATIONS = {"silu": 0, "swigluoai": 1, "swiglustep": 2, "gelu": 3, "gelu_tanh": 4, "relu2": 5}
"""Name to the number that kernels branch on. relu2 is the only one without a gate."""


def is_gated(activation: str) -> bool:
    """Whether the layer has an up projection beside the gate."""
    return activation != "relu2"


def decode_e4m3(byte: Tensor) -> Tensor:
    """Bytes (uint8, any shape) to float32, exactly: subnormals 0x01..0x07 included, 0x7F and 0xFF are NaN."""
    return byte.view(torch.float8_e4m3fn).to(torch.float32)


def encode_e4m3(value: Tensor) -> Tensor:
    """Float32 >= 0 to the nearest byte, ties to even; above 448 saturates (older torch gave NaN there)."""
    return value.clamp(max=E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def unpack(codes: Tensor) -> Tensor:
    """Packed codes uint8 [..., K/2] to float32 [..., K]; element 2k is in the low nibble."""
    table = torch.tensor((*E2M1, *(-v for v in E2M1)), dtype=torch.float32, device=codes.device)
    pairs = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
    return table[pairs.int()]


def pack(nibbles: Tensor) -> Tensor:
    """Codes 0..15, one a byte [..., K], to packed uint8 [..., K/2]."""
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)


def encode_e2m1(value: Tensor) -> Tensor:
    """Float32 to codes 0..15, nearest, ties to the even code; magnitudes above 6 saturate; -0 keeps its sign."""
    a = value.abs()
    code = (a > 0.25).to(torch.uint8)
    for threshold, tie_up in ((0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False)):
        code += (a >= threshold) if tie_up else (a > threshold)
    return code | (torch.signbit(value).to(torch.uint8) << 3)


def scale_of_amax(amax: Tensor) -> Tensor:
    """Global scale amax / 2688 in float32; zero where that is below the smallest normal float32 (nothing to encode)."""
    scale = amax.to(torch.float32) / GLOBAL_DIVISOR
    return torch.where(scale < FLOAT32_MIN_NORMAL, torch.zeros_like(scale), scale)


def quantize_blocks(x: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise x [..., K] with a global scale that broadcasts against [..., 1].

    The block scale is e4m3(amax16 / (6 g)); a code is e2m1(x / (s g)) with the rounded s and the product s*g in
    float32. A zero block scale gives zero codes. A block with a NaN or an infinity, or a global scale that is neither
    zero nor a positive normal number, gets scale byte 0x7F.

    Returns:
        codes uint8 [..., K/2], block_scale uint8 [..., K/16].
    """
    blocks = x.to(torch.float32).unflatten(-1, (-1, GROUP))
    g = global_scale.to(torch.float32)
    amax = blocks.abs().amax(-1)
    ratio = torch.where(amax > 0, amax / (E2M1_MAX * g), torch.zeros_like(amax))
    usable = (g == 0) | ((g >= FLOAT32_MIN_NORMAL) & (g < float("inf")))
    fault = ~torch.isfinite(amax) | ~usable
    byte = encode_e4m3(torch.where(fault | (g == 0), torch.zeros_like(ratio), ratio))
    step = (decode_e4m3(byte) * g).unsqueeze(-1)
    nibbles = torch.where(step > 0, encode_e2m1(blocks / step), torch.zeros((), dtype=torch.uint8, device=x.device))
    return pack(nibbles.flatten(-2)), torch.where(fault, NAN_SCALE, byte).to(torch.uint8)


def dequantize_blocks(codes: Tensor, block_scale: Tensor) -> Tensor:
    """e2m1 * e4m3 in float32 [..., K], exact in bf16 and fp16 too; the global scale is the caller's."""
    values = unpack(codes).unflatten(-1, (-1, GROUP))
    return (values * decode_e4m3(block_scale).unsqueeze(-1)).flatten(-2)
