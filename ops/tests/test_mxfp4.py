"""MXFP4 to NVFP4: every dequantised value equal, or a refusal; never a rounding."""

import pytest
import torch

import nvfp4
from nvfp4.format import dequantize_blocks, encode_e2m1, pack, unpack


def mx_values(scale, codes):
    """Dequantise MXFP4 in float64, the dumb way."""
    exponent = (scale.to(torch.float64) - 127).repeat_interleave(32, dim=1)
    return unpack(codes).double() * torch.pow(torch.tensor(2.0, dtype=torch.float64), exponent)


def nv_values(codes, block_scale, global_scale):
    return dequantize_blocks(codes, block_scale).double() * global_scale.double()


@pytest.mark.parametrize("top", [127 + 2, 127 - 8, 127 - 60, 12, 5])
def test_every_span_up_to_17_binades_is_bit_exact(top, device):
    """One row per span, so each exponent difference meets every code."""
    lowest = max(top - 17, 0)
    scale = torch.tensor([[top, k] for k in range(lowest, top + 1)], dtype=torch.uint8, device=device)
    codes = torch.arange(16, dtype=torch.uint8).repeat_interleave(2).view(1, 32)  # each nibble value, both halves
    codes = (codes | (codes << 4)).repeat(scale.shape[0], 1).to(device)
    block_scale, global_scale = nvfp4.from_mxfp4(scale, codes)
    assert torch.equal(mx_values(scale, codes), nv_values(codes, block_scale, global_scale))
    assert float(global_scale) >= 2.0**-126


def test_a_power_of_two_is_lossless_where_amax_over_2688_costs_5_percent():
    w = torch.randn(64, 512, generator=torch.Generator().manual_seed(0)).view(64, 16, 32)
    power = w.abs().amax(-1).log2().floor() - 2
    scale = (power + 127).to(torch.uint8)
    codes = pack(encode_e2m1((w / torch.exp2(power)[..., None]).flatten(1)))
    want = mx_values(scale, codes)
    block_scale, global_scale = nvfp4.from_mxfp4(scale, codes)
    assert torch.equal(want, nv_values(codes, block_scale, global_scale))
    amax = (want.abs().amax() / 2688).float()
    again = nv_values(*nvfp4.quantize(want.float(), amax), amax)
    assert 0.04 < float((again - want).norm() / want.norm()) < 0.07


def test_dead_blocks_do_not_widen_the_span():
    scale = torch.tensor([[100, 200, 0]], dtype=torch.uint8)
    codes = torch.full((1, 48), 0x22, dtype=torch.uint8)
    codes[:, 16:] = 0x80  # plus and minus zero
    block_scale, global_scale = nvfp4.from_mxfp4(scale, codes)
    assert block_scale.tolist() == [[0x78, 0x78, 0, 0, 0, 0]] and float(global_scale) == 2.0 ** (100 - 127 - 8)
    with pytest.raises(nvfp4.NVFP4Error, match=r"span 2\^-127 to 2\^73, 200 binades"):
        nvfp4.from_mxfp4(scale)
    block_scale, global_scale = nvfp4.from_mxfp4(scale, torch.zeros_like(codes))
    assert not block_scale.any() and 0 < float(global_scale) < 1


def test_18_binades_are_refused_not_rounded():
    codes = torch.full((1, 32), 0x11, dtype=torch.uint8)
    nvfp4.from_mxfp4(torch.tensor([[120, 103]], dtype=torch.uint8), codes)
    with pytest.raises(nvfp4.NVFP4Error, match="18 binades; only 17 convert without loss"):
        nvfp4.from_mxfp4(torch.tensor([[120, 102]], dtype=torch.uint8), codes)


def test_a_nan_scale_stays_visible_and_does_not_widen_the_span():
    block_scale, global_scale = nvfp4.from_mxfp4(torch.tensor([[120], [255]], dtype=torch.uint8))
    assert block_scale.tolist() == [[0x78, 0x78], [0x7F, 0x7F]] and float(global_scale) == 2.0 ** (120 - 127 - 8)


def test_wrong_dtypes_and_shapes_are_sentences():
    with pytest.raises(nvfp4.ShapeError, match=r"need E8M0 bytes as uint8 \[N, K/32\]"):
        nvfp4.from_mxfp4(torch.ones(2, 2))
    with pytest.raises(nvfp4.ShapeError, match=r"need uint8 \[2, 32\]"):
        nvfp4.from_mxfp4(torch.ones(2, 2, dtype=torch.uint8), torch.ones(2, 16, dtype=torch.uint8))


def test_the_float8_view_and_the_bytes_agree():
    scale = torch.tensor([[120, 119]], dtype=torch.uint8)
    for a, b in zip(nvfp4.from_mxfp4(scale), nvfp4.from_mxfp4(scale.view(torch.float8_e8m0fnu)), strict=True):
        assert torch.equal(a, b)
