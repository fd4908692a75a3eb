"""The check on scales alone, and the findings that only a look over a whole projection makes."""

import math

import pytest
import torch

import nvfp4
from nvfp4 import ExpertsSpec, RawExperts, rules

SPEC = ExpertsSpec(4, 16, 16, layer="model.layers.3.mlp.experts")


def scales_only(codes, skip=(), **changes):
    raw = RawExperts.of(SPEC, codes=codes)
    for e in range(SPEC.num_experts):
        for projection in SPEC.projections:
            raw.note(e, projection, "weight", f"f:{e}")
            values = {
                "weight_scale": torch.full((16, 1), 0x38, dtype=torch.uint8),
                "weight_scale_2": torch.tensor(1e-3),
                "input_scale": torch.tensor(2e-3),
            }
            for tensor, value in values.items():
                if (e, projection, tensor) not in skip:
                    raw.load(e, projection, tensor, changes.get(f"{e}/{projection}/{tensor}", value), "f")
    return raw


def found(report):
    return [(f.severity, f.expert, f.projection, f.tensor, f.kind) for f in report.findings]


def never(expert, projection):
    raise AssertionError("healthy scales never need codes")


def test_scales_alone_are_checked_without_a_byte_of_weights():
    raw = scales_only(never)
    assert "w13" not in raw.tensors and "w2" not in raw.tensors
    report = nvfp4.check(raw, "w4a4_static")
    assert report.ok and not report.findings and report.block_scales["total"] == 4 * 48
    with pytest.raises(nvfp4.NVFP4Error, match="hold scales only"):
        nvfp4.finalize(raw)
    with pytest.raises(nvfp4.ShapeError, match="only scales are held"):
        raw.load(0, "gate_proj", "weight", torch.zeros(16, 8, dtype=torch.uint8))


@pytest.mark.parametrize("byte, severity, kind", [(0x80, "note", "zero_expert"), (0x22, "error", "zero")])
def test_codes_are_asked_for_only_where_a_zero_scale_raises_the_question(byte, severity, kind):
    asked = []

    def codes(expert, projection):
        asked.append((expert, projection))
        return torch.full((16, 8), byte, dtype=torch.uint8)

    report = nvfp4.check(scales_only(codes, **{"2/up_proj/weight_scale_2": torch.tensor(0.0)}))
    assert found(report) == [(severity, 2, "up_proj", "weight_scale_2", kind)] and asked == [(2, "up_proj")]


@pytest.mark.parametrize("factor, reported", [(127.0, False), (129.0, True), (1 / 127, False), (1 / 129, True)])
@pytest.mark.parametrize("tensor, base", [("weight_scale_2", 1e-3), ("input_scale", 2e-3)])
def test_an_outlier_is_reported_not_refused(factor, reported, tensor, base):
    changes = {f"1/down_proj/{tensor}": torch.tensor(base * factor)}
    report = nvfp4.check(scales_only(never, **changes), "w4a4_static")
    want = [("note", 1, "down_proj", tensor, "outlier")] if reported else []
    assert report.ok and [f for f in found(report) if f[4] == "outlier"] == want


def test_bad_activation_scales_are_noted_where_nothing_consumes_them():
    changes = {"1/down_proj/input_scale": torch.tensor(math.nan), "2/up_proj/input_scale": torch.tensor(0.0)}
    for precision in ("w4a16", "w4a4_per_token"):
        report = nvfp4.check(scales_only(never, **changes), precision)
        assert report.ok and found(report) == [
            ("note", 1, "down_proj", "input_scale", "not_finite"), ("note", 2, "up_proj", "input_scale", "zero"),
        ]  # fmt: skip
    assert len(nvfp4.check(scales_only(never, **changes), "w4a4_static").errors) == 2


def test_the_product_is_checked_with_the_scale_that_is_used():
    """Gate and up feed one x with the larger of their scales: 1e-20 alone would underflow with the weight scale."""
    changes = {
        "0/gate_proj/weight_scale_2": torch.tensor(1e-20), "0/gate_proj/input_scale": torch.tensor(1e-20),
        "1/gate_proj/weight_scale_2": torch.tensor(1e-20), "1/gate_proj/input_scale": torch.tensor(1e-20),
        "1/up_proj/input_scale": torch.tensor(1e-20),
    }  # fmt: skip
    report = nvfp4.check(scales_only(never, **changes), "w4a4_static")
    assert [(f.expert, f.projection, f.kind) for f in report.errors] == [(1, "gate_proj", "alpha")]


def held_at_the_peak(call):
    """Bytes a call has allocated and not freed at its peak, with what torch allocates inside of its operators."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    events = (e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]")
    now = peak = 0
    for _, size in sorted((e.start_ns(), e.nbytes()) for e in events):
        now += size
        peak = max(peak, now)
    return peak


@pytest.mark.parametrize(
    "experts, hidden, inter, activation",
    [(8, 7168, 2048, "silu"), (24, 2048, 768, "silu"), (24, 2048, 768, "relu2")],
)
def test_the_check_holds_less_than_an_expert_beside_the_layer(experts, hidden, inter, activation):
    spec = nvfp4.ExpertsSpec(experts, hidden, inter, activation)
    raw = nvfp4.RawExperts.of(spec, codes=lambda *_: pytest.fail("nothing here raises a question"))
    for name, tensor in raw.tensors.items():
        tensor.fill_(0x38) if name.endswith("block_scale") else tensor.fill_(1e-4)
    for e in range(experts):
        for projection in spec.projections:
            for tensor in ("weight", "weight_scale", "weight_scale_2", "input_scale"):
                raw.note(e, projection, tensor, "here")
    expert = len(spec.projections) * hidden * inter * 9 // 16
    peak = held_at_the_peak(lambda: nvfp4.check(raw, "w4a4_static"))
    assert hidden * inter // 16 <= peak < expert


def test_bytes_are_counted_right_in_every_row_length():
    for size in (1, 7, 16, 24, 1000, 8 * 255 * 3, 8 * 1024):
        scale = torch.arange(5 * size).remainder(256).to(torch.uint8).reshape(5, size)
        scale[1], scale[2] = 0xFF, 0x7E
        signed = scale.view(torch.float8_e4m3fn).float()
        nan = signed.isnan()
        want = [nan, (signed < 0) & ~nan, scale & 0x7F == 0, (scale > 0) & (scale < 8), scale == 0x7E]
        negative = want[1] | (scale == 0xFF) & ~nan
        assert rules.count_bytes(scale).tolist() == torch.stack([want[0], negative, *want[2:]], 2).sum(1).tolist()


def test_a_bias_that_is_not_finite_is_refused(device):
    spec = ExpertsSpec(2, 16, 16, bias=True)
    raw = RawExperts.of(spec, device)
    for e in range(2):
        for projection in spec.projections:
            raw.load(e, projection, "weight", torch.full((16, 8), 0x22, dtype=torch.uint8))
            raw.load(e, projection, "weight_scale", torch.full((16, 1), 0x38, dtype=torch.uint8))
            raw.load(e, projection, "weight_scale_2", torch.tensor(1e-3))
            bias = torch.zeros(16)
            bias[:3] = math.inf if (e, projection) == (1, "up_proj") else 0
            raw.load(e, projection, "bias", bias)
    with pytest.raises(nvfp4.ScaleError, match=r"expert 1: up_proj.bias = 3 values \[not_finite\]"):
        nvfp4.finalize(raw)
