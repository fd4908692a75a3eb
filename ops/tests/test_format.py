"""The numbers, exhaustively and bit for bit, on every path: torch, Triton, C++, and the oracle that shares nothing."""

import math

import pytest
import torch

import nvfp4
from nvfp4 import format as fmt
from nvfp4 import oracle

TIES = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]
GOLDEN = {
    # name: x, encode factor, scale byte, packed codes
    "ties": (TIES + [-v for v in TIES], 1.0, 0x38, "20426476a8caecfe"),
    "ties at 448": (TIES + [-v for v in TIES], 448.0, 0x7E, "20426476a8caecfe"),
    "ramp": ([3 * i / 16 for i in range(1, 17)], 896.0, 0x7E, "2132445565667677"),
    "tiny": ([1e-6] * 16, 448.0, 0x00, "00" * 8),
    "subnormal": ([2.0**-9 * 6 / 448] * 16, 448.0, 0x01, "77" * 8),
}
ROWS = {
    "f9b97a80": [-0.5, -6, -0.5, -1.5, -1, 6, 0.0, -0.0],
    "fa891108": [-1, -6, -0.5, -0.0, 0.5, 0.5, -0.0, 0.0],
    "fdc9b988": [-3, -6, -0.5, -2, -0.5, -1.5, -0.0, -0.0],
    "73982208": [1.5, 6, -0.0, -0.5, 1, 1, -0.0, 0.0],
}


@pytest.fixture(params=["torch", "triton"])
def path(request, triton_ops, device):
    """quantize and dequantize by each implementation, on tensors of the device it runs on."""
    if request.param == "torch":
        ops = torch.ops.nvfp4
        return ops.quantize, ops.quantize_per_token, ops.dequantize, "cpu"
    return *(triton_ops[n] for n in ("quantize", "quantize_per_token", "dequantize")), device


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_vectors(path, name):
    quantize, _, dequantize, device = path
    x, factor, byte, packed = GOLDEN[name]
    scale = (torch.ones(()) / factor).to(device)
    codes, scales = quantize(torch.tensor([x], device=device), scale)
    assert scales.tolist() == [[byte]]
    assert bytes(codes[0].tolist()).hex() == packed
    decoded = dequantize(codes, scales, scale, torch.float32)
    if name == "tiny":
        assert not decoded.any()
    if name == "subnormal":
        assert decoded.unique().tolist() == pytest.approx([2.61579e-5], rel=1e-5)


def test_one_ulp_past_a_tie_rounds_away(path):
    quantize, _, _, device = path
    above = torch.nextafter(torch.tensor(TIES), torch.tensor(math.inf))
    above[-1] = 6.0
    x = torch.cat([above, -above])[None].to(device)
    codes, _ = quantize(x, torch.ones((), device=device))
    assert bytes(codes[0].tolist()).hex() == "21436577a9cbedff"


@pytest.mark.parametrize("packed", ROWS)
def test_packed_rows(path, packed):
    quantize, _, _, device = path
    x = torch.tensor([ROWS[packed] * 2], device=device)
    codes, scales = quantize(x, torch.ones((), device=device))
    assert bytes(codes[0, :4].tolist()).hex() == packed and scales.tolist() == [[0x38]]


def test_global_scale_of_known_maxima():
    maxima = torch.tensor([6.0, 1.0, 3584.0])
    assert fmt.scale_of_amax(maxima).tolist() == pytest.approx([0.00223214286, 3.7202381e-4, 1.3333333], rel=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_code_times_every_scale_decodes_exactly(path, dtype):
    _, _, dequantize, device = path
    if device == "cpu" and dtype == torch.bfloat16 and dequantize is not torch.ops.nvfp4.dequantize:
        pytest.skip("the interpreter's bfloat16 is wrong; a GPU runs this")
    scales = torch.arange(256, dtype=torch.uint8, device=device)[:, None]
    codes = fmt.pack(torch.arange(16, dtype=torch.uint8).repeat(256, 1)).to(device)
    got = dequantize(codes, scales, torch.ones((), device=device), dtype).cpu()
    want = torch.tensor([[oracle.decode_code(c) * oracle.decode_scale(b) for c in range(16)] for b in range(256)])
    for byte in range(256):
        row = got[byte].to(torch.float64)
        if byte & 0x7F == 0x7F:
            assert row.isnan().all()
        else:
            assert torch.equal(row, want[byte].to(torch.float64)), f"scale byte {byte:#x}"


def test_triton_scale_decode_is_torchs(path):
    _, _, dequantize, device = path
    scales = torch.arange(0x7F, dtype=torch.uint8, device=device)[:, None]
    codes = torch.full((0x7F, 8), 0x22, dtype=torch.uint8, device=device)
    got = dequantize(codes, scales, torch.ones((), device=device), torch.float32)[:, 0].cpu()
    assert torch.equal(got, torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("std", [1e-30, 1e-3, 1.0, 1e4])
@pytest.mark.parametrize("per_token", [False, True])
def test_quantiser_agrees_with_the_oracle(path, std, per_token):
    quantize, quantize_per_token, _, device = path
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(1)) * std
    x[1] = 0
    x[2, 16:32] = 0
    x[3, 5], x[4, 7], x[4, 40] = float("nan"), float("inf"), -float("inf")
    if per_token:
        codes, scales, g = quantize_per_token(x.to(device))
        g = g.flatten().tolist()
    else:
        scale = torch.tensor(std / 500)
        codes, scales = quantize(x.to(device), scale.to(device))
        g = [float(scale)] * 6
    for row in range(6):
        want_codes, want_scales = oracle.quantize_row(x[row].tolist(), g[row])
        assert scales[row].tolist() == want_scales
        assert fmt.pack(torch.tensor(want_codes, dtype=torch.uint8)).tolist() == codes[row].tolist()


def test_token_scale_ignores_faults_and_tiny_rows(path):
    _, quantize_per_token, dequantize, device = path
    x = torch.zeros(4, 32)
    x[0, 0] = 2688.0
    x[1, 0], x[1, 20] = 5.376, float("nan")
    x[2, 0] = 1e-36
    codes, scales, g = quantize_per_token(x.to(device))
    assert g.flatten().tolist() == pytest.approx([1.0, 0.002, 0.0, 0.0])
    assert scales.tolist() == [[0x7E, 0], [0x7E, 0x7F], [0, 0], [0, 0]]
    back = dequantize(codes, scales, g, torch.float32).cpu()
    assert back[0, 0] == 2688.0 and not back[2:].any() and back[1, 16:].isnan().all() and back[1, :16].isfinite().all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0, 1e-40])
def test_an_unusable_global_scale_stays_visible(path, bad):
    quantize, _, _, device = path
    _, scales = quantize(torch.ones(1, 32, device=device), torch.tensor(bad, device=device))
    assert scales.tolist() == [[0x7F, 0x7F]]


def test_pack_and_unpack_are_inverse():
    nibbles = torch.arange(256, dtype=torch.uint8) % 16
    values = fmt.unpack(fmt.pack(nibbles))
    assert torch.equal(values, torch.tensor([oracle.decode_code(int(c)) for c in nibbles]))
    assert torch.equal(fmt.encode_e2m1(values), nibbles)


def test_python_functions_view_float8_scales():
    codes, scales = nvfp4.quantize(torch.randn(3, 32), torch.tensor(1e-3))
    as_float8 = scales.view(torch.float8_e4m3fn)
    assert torch.equal(
        nvfp4.dequantize(codes, as_float8, torch.tensor(1e-3)), nvfp4.dequantize(codes, scales, torch.tensor(1e-3))
    )
