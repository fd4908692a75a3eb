"""MXFP4 to NVFP4 without losing a bit: the codes stay, one scale per 32 becomes two per 16 under a power of two.

An E8M0 byte b means 2^(b-127); 255 is NaN. e4m3 holds the powers 2^-9 .. 2^8, so a matrix whose live blocks span at
most 17 binades fits exactly. (An amax/2688 global scale, which is no power of two, would cost 5.4 % instead.)

Source: OCP Microscaling Formats v1.0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .errors import NVFP4Error
from .format import NAN_SCALE
from .registry import need

SPAN = 17
"""Binades between the largest and the smallest block scale that still convert exactly."""
_E8M0_NAN = 255


def from_mxfp4(scale: Tensor, codes: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Scales of one MXFP4 matrix as NVFP4 scales; the packed codes are the same in both formats.

    Args:
        scale: E8M0 bytes, uint8 or float8_e8m0fnu, [N, K/32].
        codes: packed uint8 [N, K/2]. Blocks whose codes are all zero then get scale 0 and do not count for the span;
            without codes every block counts.

    Returns:
        block_scale uint8 [N, K/16] (e4m3 bytes, powers of two) and global_scale float32 (), such that every
        dequantised value is equal, bit for bit. A NaN scale stays one (byte 0x7F), for the check to find.

    Raises:
        ShapeError: wrong dtype or shape. NVFP4Error: a span above 17 binades.
    """
    if scale.dtype == torch.float8_e8m0fnu:
        scale = scale.view(torch.uint8)
    need(
        scale.dtype == torch.uint8 and scale.dim() == 2,
        "from_mxfp4",
        f"scale is {scale.dtype} {tuple(scale.shape)}; need E8M0 bytes as uint8 [N, K/32]",
    )
    fault = scale == _E8M0_NAN
    live = ~fault
    if codes is not None:
        n, blocks = scale.shape
        need(
            codes.dtype == torch.uint8 and tuple(codes.shape) == (n, 16 * blocks),
            "from_mxfp4",
            f"codes are {codes.dtype} {tuple(codes.shape)}; for scales [{n}, {blocks}] need uint8 [{n}, {16 * blocks}]",
        )
        live &= (codes.unflatten(1, (blocks, 16)) & 0x77 != 0).any(2)
    power = scale.to(torch.int32) - 127
    first = torch.where(live, power, -1000).amax() if scale.numel() else power.new_tensor(-1000)
    last = torch.where(live, power, 1000).amin() if scale.numel() else power.new_tensor(1000)
    high, low = (int(v) for v in torch.stack([first, last]).cpu())
    base = max(high - 8, -126) if high > -1000 else -8
    if low - base < -9:
        raise NVFP4Error(
            f"the E8M0 scales span 2^{low} to 2^{high}, {high - low} binades; only {SPAN} convert without loss, and "
            "nothing is rounded here: re-quantise this tensor to NVFP4 from its original weights"
        )
    b = torch.where(live, power - base, -10)
    byte = torch.where(b >= -6, (b + 7) << 3, 1 << (b + 9).clamp(min=0))
    byte = torch.where(fault, NAN_SCALE, torch.where(live, byte, 0)).to(torch.uint8)
    return byte.repeat_interleave(2, dim=1), torch.tensor(2.0**base, device=scale.device)
