"""What finalize refuses, accepts, repairs and reports; and that its weights keep their addresses."""

import json
import math

import pytest
import torch

import nvfp4
from nvfp4 import RawExperts, ScaleError, finalize

E = 4
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def fill(raw, skip=(), **changes):
    """Fill with a healthy unit layer; skip and changes are keyed (expert, projection, tensor)."""
    changes = {tuple(k.split("/")): v for k, v in changes.items()}
    spec = raw.spec
    for e in range(spec.num_experts):
        for projection in spec.projections:
            n, k = spec.shape(projection)
            values = {
                "weight": torch.full((n, k // 2), 0x22, dtype=torch.uint8),
                "weight_scale": torch.full((n, k // 16), 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn),
                "weight_scale_2": torch.tensor(1 / 16),
                "input_scale": torch.tensor([0.5 + e]),
            }
            for tensor, value in values.items():
                if (e, projection, tensor) not in skip:
                    value = changes.get((str(e), projection, tensor), value)
                    raw.load(e, projection, tensor, value, source=f"model.safetensors:{e}.{projection}.{tensor}")
    return raw


def raw_experts(device="cpu", **kwargs):
    return RawExperts(E, 16, 16, layer="model.layers.7.mlp.experts", device=device, **kwargs)


def refused(raw, precision="w4a16", **kwargs):
    with pytest.raises(ScaleError) as error:
        finalize(raw, precision, **kwargs)
    return error.value.report


def test_a_healthy_checkpoint_is_taken_as_it_is(device):
    raw = fill(raw_experts(device))
    addresses = {name: t.data_ptr() for name, t in raw.tensors.items()}
    weights, report = finalize(raw, "w4a4_static")
    assert report.ok and not [f for f in report.findings if f.severity != "note"]
    assert weights.tensors["w13"].data_ptr() == addresses["w13"]  # handed over, not copied
    assert weights.tensors["a13_scale"].tolist() == [0.5, 1.5, 2.5, 3.5] == weights.tensors["a2_scale"].tolist()
    assert report.block_scales == {"total": E * 48, "zero": 0, "subnormal": 0, "saturated": 0}


@pytest.mark.parametrize("garbage", [0.25, float("nan")])
def test_a_missing_activation_scale_is_found_whatever_memory_held(garbage, device):
    raw = fill(raw_experts(device), skip={(3, "down_proj", "input_scale")})
    raw.tensors["a2_scale"][3] = garbage
    report = refused(raw, "w4a4_static")
    (finding,) = report.errors
    assert (finding.layer, finding.expert, finding.projection, finding.tensor, finding.kind) == (
        "model.layers.7.mlp.experts", 3, "down_proj", "input_scale", "missing",
    )  # fmt: skip
    for precision in ("w4a16", "w4a4_per_token"):
        weights, report = finalize(fill(raw_experts(device), skip={(3, "down_proj", "input_scale")}), precision)
        assert report.ok and [f.kind for f in report.findings] == ["uncalibrated"] and "a2_scale" not in weights.tensors


BAD = {
    0.0: "zero",
    -1.0: "negative",
    math.nan: "not_finite",
    math.inf: "not_finite",
    1e-45: "subnormal",
    2.9e-39: "subnormal",
    2.94e-39: "subnormal",
    3e38: "reciprocal",
}


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("tensor", ["input_scale", "weight_scale_2"])
@pytest.mark.parametrize("projection", PROJECTIONS)
def test_each_bad_scale_has_its_own_reason(value, tensor, projection, device):
    raw = fill(raw_experts(device), **{f"2/{projection}/{tensor}": torch.tensor(value)})
    report = refused(raw, "w4a4_static")
    assert [(f.expert, f.projection, f.tensor, f.kind) for f in report.errors] == [(2, projection, tensor, BAD[value])]
    assert "model.layers.7.mlp.experts, expert 2" in str(report) and report.errors[0].source.endswith(tensor)


@pytest.mark.parametrize("value", [0.5, 1.0, 2.0, 4.0])
def test_healthy_activation_scales_come_out_bit_identical(value, device):
    changes = {f"{e}/{p}/input_scale": torch.tensor(value) for e in range(E) for p in PROJECTIONS}
    weights, report = finalize(fill(raw_experts(device), **changes), "w4a4_static")
    assert report.ok and all(weights.tensors[n].tolist() == [value] * E for n in ("a13_scale", "a2_scale"))


def test_gate_and_up_scales_that_differ_are_kept_and_reported(device):
    gate, up = torch.tensor(3.85e-5), torch.tensor(4.83e-5)
    changes = {"2/gate_proj/weight_scale_2": gate, "2/up_proj/weight_scale_2": up}
    changes |= {
        f"{e}/up_proj/weight_scale_2": torch.tensor(v) for e, v in ((1, math.nan), (3, 0.0))
    }  # no ratio of these
    weights, report = finalize(fill(raw_experts(device), **changes), policy="report")
    assert weights.tensors["w13_global_scale"][2].tolist() == [float(gate), float(up)]
    assert report.gate_up_ratio == float(up / gate) == report.to_dict()["gate_up_ratio"]
    assert "; gate and up scales up to 1.25x apart" in str(report)
    same = finalize(fill(raw_experts(device)))[1]
    assert same.gate_up_ratio == 1.0 and "apart" not in str(same)
    same.merge(report)
    assert same.gate_up_ratio == report.gate_up_ratio


def test_smallest_normal_scale_passes_unless_its_product_does_not(device):
    tiny = torch.tensor(1.18e-38)
    changes = {"2/down_proj/input_scale": tiny, "2/down_proj/weight_scale_2": torch.tensor(1.0)}
    assert finalize(fill(raw_experts(device), **changes), "w4a4_static")[1].ok
    changes["2/down_proj/weight_scale_2"] = torch.tensor(1e-3)
    assert [f.kind for f in refused(fill(raw_experts(device), **changes), "w4a4_static").errors] == ["alpha"]


def test_both_lists_of_dead_experts_are_in_one_report():
    zero = torch.tensor(0.0)
    raw = RawExperts(8, 16, 16)
    changes = {f"{e}/{p}/input_scale": zero for e in (0, 3) for p in ("gate_proj", "up_proj")}
    changes |= {f"{e}/down_proj/input_scale": zero for e in (2, 7)}
    report = refused(fill(raw, **changes), "w4a4_static")
    dead = lambda p: [f.expert for f in report.errors if f.projection == p]  # noqa: E731
    assert dead("gate_proj") == dead("up_proj") == [0, 3] and dead("down_proj") == [2, 7]
    assert "experts 2, 7: down_proj.input_scale = 0" in str(report)


def test_weight_only_never_looks_at_activation_scales(unit_layer):
    raw = fill(raw_experts(), skip={(e, p, "input_scale") for e in range(E) for p in PROJECTIONS})
    raw.tensors["a13_scale"].zero_()
    weights, report = finalize(raw, "w4a16")
    assert report.ok and not report.findings
    layer = unit_layer(dtype=torch.float32)
    assert float(weights(layer.x, layer.ids, layer.router)[0, 0]) == pytest.approx(0.731059, rel=1e-6)


@pytest.mark.parametrize("value", [2688.0, 1.001])
def test_a_weight_scale_on_the_wrong_side_of_one(value):
    report = refused(fill(raw_experts(), **{"1/up_proj/weight_scale_2": torch.tensor(value)}))
    assert [(f.expert, f.kind) for f in report.errors] == [(1, "convention")] and "reciprocal" in report.errors[
        0
    ].action


@pytest.mark.parametrize(
    "byte, kind", [(0x7F, "nan_block"), (0xFF, "nan_block"), (0xB8, "negative_block"), (0x80, None)]
)
def test_block_scale_bytes(byte, kind, device):
    scales = torch.full((16, 1), 0x38, dtype=torch.uint8)
    scales[5, 0] = byte
    raw = fill(raw_experts(device), **{"1/up_proj/weight_scale": scales})
    if kind is None:
        assert finalize(raw)[1].ok
        return
    (finding,) = refused(raw).errors
    assert (finding.expert, finding.kind, finding.value) == (
        1,
        kind,
        f"0x{byte:02X}",
    ) and "row 5, block 0" in finding.rule


def test_nan_block_over_zero_codes_is_repaired_only_on_request():
    def broken(zero_codes=True):
        scales = torch.full((16, 1), 0x38, dtype=torch.uint8)
        codes = torch.full((16, 8), 0x22, dtype=torch.uint8)
        scales[5, 0] = 0x7F
        if zero_codes:
            codes[5] = 0x08
        return fill(raw_experts(), **{"1/up_proj/weight_scale": scales, "1/up_proj/weight": codes})

    assert refused(broken()).errors[0].kind == "nan_block"
    weights, report = finalize(broken(), repairs=("zero_nan_blocks",))
    assert [f.severity for f in report.findings] == ["repaired"] and weights.tensors["w13_block_scale"][1, 21, 0] == 0
    assert refused(broken(zero_codes=False), repairs=("zero_nan_blocks",)).errors[0].kind == "nan_block"


def test_an_all_zero_expert_may_have_a_zero_global_scale(unit_layer, device):
    zeros = {f"1/{p}/weight": torch.full((16, 8), 0x80, dtype=torch.uint8) for p in PROJECTIONS}
    zeros |= {f"1/{p}/weight_scale_2": torch.tensor(0.0) for p in PROJECTIONS}
    weights, report = finalize(fill(raw_experts(device), **zeros))
    assert report.ok and {f.kind for f in report.findings} == {"zero_expert"}
    layer = unit_layer(dtype=torch.float32, expert=1).on(device)
    assert not weights(layer.x, layer.ids, layer.router).any()
    one_live = {k: v for k, v in zeros.items() if k != "1/up_proj/weight"}
    assert [f.kind for f in refused(fill(raw_experts(device), **one_live)).errors] == ["zero"]


def test_filling_in_activation_scales_is_opt_in_and_listed(device):
    changes = {"1/down_proj/input_scale": torch.tensor(math.nan)}
    raw = fill(raw_experts(device), skip={(2, "gate_proj", "input_scale"), (2, "up_proj", "input_scale")}, **changes)
    weights, report = finalize(raw, "w4a4_static", repairs=("fill_activation_max",))
    repaired = {(f.expert, f.projection) for f in report.findings if f.severity == "repaired"}
    assert report.ok and repaired == {(1, "down_proj"), (2, "gate_proj"), (2, "up_proj")}
    assert weights.tensors["a13_scale"].tolist() == [0.5, 1.5, 3.5, 3.5]
    assert weights.tensors["a2_scale"].tolist() == [0.5, 3.5, 2.5, 3.5]
    nothing_healthy = fill(raw_experts(device), skip={(e, "down_proj", "input_scale") for e in range(E)})
    assert len(refused(nothing_healthy, "w4a4_static", repairs=("fill_activation_max",)).errors) == E


def test_suspicious_but_legal_values_are_reported():
    changes = {
        "0/gate_proj/weight_scale_2": torch.tensor(1 / 64),
        "1/down_proj/input_scale": torch.tensor(1.0),
        "2/up_proj/input_scale": torch.tensor(9.0),
        "3/down_proj/weight_scale": torch.full((16, 1), 0x7E, dtype=torch.uint8),
    }
    weights, report = finalize(fill(raw_experts(), **changes), "w4a4_static")
    large = {(e, "above_one") for e in (1, 2, 3)}
    assert report.ok and {(f.expert, f.kind) for f in report.findings} == large | {
        (0, "gate_up_ratio"), (1, "fallback"), (2, "gate_up_input"), (3, "saturated"),
    }  # fmt: skip
    assert weights.tensors["a13_scale"][2] == 9.0  # the maximum feeds the one x


def test_policies():
    broken = lambda: fill(raw_experts(), **{"1/up_proj/weight_scale_2": torch.tensor(math.nan)})  # noqa: E731
    weights, report = finalize(broken(), policy="report")
    assert not report.ok and weights.tensors["w13_global_scale"][1, 1].isnan()
    weights, report = finalize(raw_experts(), policy="unchecked")
    assert report.ok and not report.findings
    for kwargs in ({"policy": "clamp"}, {"precision": "fp8"}, {"repairs": ("clamp",)}):
        with pytest.raises(nvfp4.NVFP4Error, match="known are"):
            finalize(raw_experts(), **kwargs)


def test_missing_and_duplicate_slots_are_named():
    report = refused(fill(raw_experts(), skip={(0, "gate_proj", "weight"), (2, "up_proj", "weight_scale")}))
    assert [(f.expert, f.tensor, f.kind) for f in report.errors] == [
        (0, "weight", "missing"),
        (2, "weight_scale", "missing"),
    ]
    raw = fill(raw_experts())
    raw.load(1, "up_proj", "weight_scale_2", torch.tensor(0.5), source="other.safetensors:x")
    (finding,) = refused(raw).errors
    assert finding.kind == "duplicate" and "other.safetensors:x" in finding.rule


@pytest.mark.parametrize(
    "slot, value, message",
    [
        ((0, "gate_proj", "weight"), torch.zeros(16, 7, dtype=torch.uint8), r"need torch.uint8 \(16, 8\)"),
        ((0, "gate_proj", "weight_scale"), torch.ones(16, 1), "viewed, never converted"),
        ((0, "gate_proj", "weight_scale_2"), torch.ones(2), r"need torch.float32 \(\)"),
        ((0, "gate_proj", "weight_scale_2"), torch.ones(1, dtype=torch.float16), "never converted"),
        ((9, "gate_proj", "weight"), torch.zeros(1), "has 4 experts"),
        ((0, "gate_proj", "bias"), torch.zeros(16), "without biases"),
        ((0, "side_proj", "weight"), torch.zeros(1), "no such slot"),
    ],
)
def test_wrong_slots_shapes_and_dtypes(slot, value, message):
    with pytest.raises(nvfp4.ShapeError, match=message):
        raw_experts().load(*slot, value, source="a.safetensors:key")


def test_raw_experts_are_used_once():
    raw = fill(raw_experts())
    finalize(raw)
    with pytest.raises(nvfp4.NVFP4Error, match="finalized already"):
        finalize(raw)
    with pytest.raises(nvfp4.ShapeError, match="finalized already"):
        raw.load(0, "gate_proj", "weight_scale_2", torch.tensor(1.0))


def test_update_keeps_addresses_and_a_b_a_is_bit_exact(unit_layer, device):
    a, b = (fill(raw_experts(device), **c) for c in ({}, {"1/down_proj/weight_scale_2": torch.tensor(0.25)}))
    again = fill(raw_experts(device))
    weights, _ = finalize(a, "w4a4_static")
    addresses = {name: t.data_ptr() for name, t in weights.tensors.items()}
    layer = unit_layer().on(device)
    first = weights(layer.x, layer.ids, layer.router)
    weights.update_(b)
    assert torch.equal(weights(layer.x, layer.ids, layer.router), first * 4)
    weights.update_(again)
    assert torch.equal(weights(layer.x, layer.ids, layer.router), first)
    assert {name: t.data_ptr() for name, t in weights.tensors.items()} == addresses
    with pytest.raises(ScaleError):
        weights.update_(fill(raw_experts(device), **{"0/up_proj/weight_scale_2": torch.tensor(0.0)}))
    assert torch.equal(weights(layer.x, layer.ids, layer.router), first)


def test_report_serialises_and_merges():
    report = refused(fill(raw_experts(), **{f"{e}/up_proj/weight_scale_2": torch.tensor(-0.5) for e in range(E)}))
    other = finalize(fill(raw_experts()))[1]
    other.merge(report)
    data = json.loads(other.to_json())
    assert data["schema"] == 1 and data["ok"] is False and data["layers"] == 2 and data["experts"] == 2 * E
    assert data["counts"] == {"error": E, "repaired": 0, "note": 0}
    assert data["findings"][0] == {
        "layer": "model.layers.7.mlp.experts", "expert": 0, "projection": "up_proj", "tensor": "weight_scale_2",
        "kind": "negative", "value": "-0.5", "rule": "must be positive", "action": "fix or re-export the checkpoint",
        "severity": "error", "source": "model.safetensors:0.up_proj.weight_scale_2",
    }  # fmt: skip


def test_non_gated_experts_and_biases(device):
    raw = fill(raw_experts(device, activation="relu2"))
    weights, report = finalize(raw)
    assert (
        report.ok and weights.tensors["w13"].shape == (E, 16, 8) and weights.tensors["w13_global_scale"].shape == (E, 1)
    )
    biased = fill(raw_experts(device, bias=True))
    assert len(refused(biased).errors) == E * 3


def test_explain_names_every_candidate(device):
    weights, _ = finalize(fill(raw_experts(device)))
    text = nvfp4.explain(weights)
    assert text.count("->") == 1 and all(name in text for name in ("triton portable", "cpu c++", "cpu torch"))


@pytest.mark.gpu
def test_first_call_inside_a_capture_is_a_sentence_and_warmup_cures_it(make_layer):
    layer = make_layer(tokens=3, experts=4, hidden=112, inter=80, top_k=2).on("cuda", torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(nvfp4.CaptureError, match=r"nvfp4\.warmup"), torch.cuda.graph(graph):
        torch.ops.nvfp4.moe(*layer.args())
    torch.cuda.synchronize()
    spec = nvfp4.ExpertsSpec(4, 112, 80)
    names = ("w13", "w13_block_scale", "w13_global_scale", "w2", "w2_block_scale", "w2_global_scale")
    tensors = dict(zip(names, layer.weights, strict=True))
    weights = nvfp4.ExpertWeights(spec, "w4a16", "checkpoint", tensors, "raise", ())
    nvfp4.warmup(weights, (3,), top_k=2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = weights(layer.x, layer.ids, layer.router)
    graph.replay()
    assert torch.equal(y, weights(layer.x, layer.ids, layer.router))


@pytest.mark.gpu
def test_a_captured_graph_follows_updated_weights_and_scales():
    raws = [fill(raw_experts("cuda"), **c) for c in ({}, {"1/down_proj/input_scale": torch.tensor(64.0)}, {})]
    weights, _ = finalize(raws[0], "w4a4_static")
    x = torch.ones(2, 16, dtype=torch.bfloat16, device="cuda")
    ids, router = torch.ones(2, 1, dtype=torch.int32, device="cuda"), torch.ones(2, 1, device="cuda")
    weights(x, ids, router)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = weights(x, ids, router)
    seen = []
    for raw in (None, *raws[1:]):
        if raw is not None:
            weights.update_(raw)
        graph.replay()
        seen.append(y.clone())
        assert torch.equal(seen[-1], weights(x, ids, router))
    assert torch.equal(seen[0], seen[2]) and not torch.equal(seen[0], seen[1])
