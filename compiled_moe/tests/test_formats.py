"""Every format and naming family of the field ends in the same canonical buffers, or in a sentence."""

import json

import pytest
import torch

import nvfp4
from compiled_moe import CheckpointError
from compiled_moe.checkpoint import Checkpoint
from compiled_moe.names import ExpertKey
from compiled_moe.shards import Reader
from nvfp4.format import dequantize_blocks, unpack

from . import checkpoints as c


def raw_of(folder):
    (layer,) = Checkpoint.open(folder).layers
    raw = nvfp4.RawExperts.of(layer.spec)
    reader = Reader()
    for part in layer.parts:
        for tensor, value in part.read(reader):
            raw.load(part.expert, part.projection, tensor, value, part.source)
    return raw


def finalized(folder, precision="w4a4_static"):
    weights, report = nvfp4.finalize(raw_of(folder), precision)
    assert report.ok
    return weights.tensors


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


@pytest.fixture
def plain(tmp_path):
    return finalized(c.write(tmp_path / "plain", c.modelopt(c.experts())))


FAMILIES = {
    "without model.": lambda m: c.modelopt(m, "layers.0.mlp.experts"),
    "mixtral": lambda m: c.modelopt(m, "model.layers.0.block_sparse_moe.experts", c.W),
    "deepseek": lambda m: c.modelopt(m, "layers.0.ffn.experts", c.W),
    "bare": lambda m: c.modelopt(m, "experts"),
    "(1)": lambda m: {k: v.reshape(1) if not v.dim() else v for k, v in c.modelopt(m).items()},
    "uint8": lambda m: {
        k: v.view(torch.uint8) if v.dtype == torch.float8_e4m3fn else v for k, v in c.modelopt(m).items()
    },
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shards", [1, 3])
def test_one_key_an_expert_in_every_family(family, shards, tmp_path, plain):
    assert same(finalized(c.write(tmp_path / "x", FAMILIES[family](c.experts()), shards=shards)), plain)


def test_both_reciprocal_conventions_finalize_to_bit_equal_buffers(tmp_path, plain):
    folder = c.write(tmp_path / "ct", c.compressed(c.experts()), c.COMPRESSED)
    assert same(finalized(folder), plain)
    raw = raw_of(folder)
    assert float(raw.slot(0, "up_proj", "weight_scale_2")) < 1 and "stored as 2688/amax" in str(raw.sources)


@pytest.mark.parametrize(
    "key, value, kind",
    [
        ("1.down_proj.input_global_scale", [float("inf")], "zero"),
        ("1.down_proj.input_global_scale", [0.0], "not_finite"),
        ("1.down_proj.weight_global_scale", [3.7e-4], "convention"),
        ("1.down_proj.weight_global_scale", [float("nan")], "not_finite"),
    ],
)
def test_bad_encode_factors_are_refused_naming_the_expert(key, value, kind, tmp_path):
    tensors = c.compressed(c.experts())
    tensors[f"model.layers.0.mlp.experts.{key}"] = torch.tensor(value)
    with pytest.raises(nvfp4.ScaleError) as error:
        nvfp4.finalize(raw_of(c.write(tmp_path, tensors, c.COMPRESSED)), "w4a4_static")
    (finding,) = error.value.report.errors
    assert (finding.expert, finding.projection, finding.kind) == (1, "down_proj", kind) and key in finding.source


def test_a_calibration_fallback_of_one_is_reported_through_the_reciprocal(tmp_path):
    tensors = c.compressed(c.experts())
    tensors["model.layers.0.mlp.experts.2.up_proj.input_global_scale"] = torch.ones(1)
    _, report = nvfp4.finalize(raw_of(c.write(tmp_path, tensors, c.COMPRESSED)), "w4a4_static")
    assert (2, "up_proj", "fallback") in {(f.expert, f.projection, f.kind) for f in report.findings}


@pytest.mark.parametrize("turned", [True, False])
def test_all_experts_in_one_tensor(turned, tmp_path):
    made = c.experts()
    for e in range(c.E):
        made[e, "up_proj"]["weight_scale_2"] = made[e, "gate_proj"]["weight_scale_2"]
        for projection in ("gate_proj", "up_proj"):
            made[e, projection]["input_scale"] = made[0, "gate_proj"]["input_scale"]
        made[e, "down_proj"]["input_scale"] = made[0, "down_proj"]["input_scale"]
    want = finalized(c.write(tmp_path / "a", c.modelopt(made)))
    assert same(finalized(c.write(tmp_path / "b", c.fused(made, turned=turned))), want)


def test_without_a_gate(tmp_path):
    made = c.experts(("up_proj", "down_proj"))
    raw = raw_of(c.write(tmp_path, c.modelopt(made, "backbone.layers.0.mixer.experts")))
    assert raw.spec.activation == "relu2" and raw.spec.projections == ("gate_proj", "down_proj")
    tensors = nvfp4.finalize(raw)[0].tensors
    assert torch.equal(tensors["w13"][2], made[2, "up_proj"]["weight"])
    assert tensors["w13_global_scale"][:, 0].tolist() == [float(made[e, "up_proj"]["weight_scale_2"]) for e in range(3)]


def mx_dense(codes, scales):
    return unpack(codes).double() * torch.exp2(scales.double() - 127).repeat_interleave(32, 1)


@pytest.mark.parametrize("family", ["gpt_oss", "deepseek"])
def test_mxfp4_dequantises_to_the_same_bits(family, tmp_path):
    made = c.mx_experts()
    bias = {"gate_up_proj": torch.arange(2.0 * c.I).repeat(c.E, 1).bfloat16(), "down_proj": torch.ones(c.E, c.H)}
    if family == "gpt_oss":
        folder = c.write(tmp_path, c.gpt_oss(made, bias=bias), {"quant_method": "mxfp4"}, model_type="gpt_oss")
    else:
        folder = c.write(tmp_path, c.deepseek(made), {"quant_method": "fp8"}, expert_dtype="fp4")
    raw = raw_of(folder)
    for e in range(c.E):
        for projection in c.GATED:
            codes, scale, g = (raw.slot(e, projection, t) for t in ("weight", "weight_scale", "weight_scale_2"))
            assert torch.equal(dequantize_blocks(codes, scale).double() * g.double(), mx_dense(*made[e, projection]))
    if family == "gpt_oss":
        assert raw.slot(1, "gate_proj", "bias").tolist() == list(range(0, 2 * c.I, 2))
        assert raw.slot(1, "up_proj", "bias").tolist() == list(range(1, 2 * c.I, 2))
    assert nvfp4.finalize(raw)[1].ok


def test_mxfp4_that_would_be_rounded_is_refused(tmp_path):
    made = c.mx_experts()
    made[2, "up_proj"][1][0] = torch.tensor([127, 100], dtype=torch.uint8)
    with pytest.raises(nvfp4.NVFP4Error, match=r"experts\.2\.w3\.scale, expert 2, up_proj: .* 27 binades"):
        raw_of(c.write(tmp_path, c.deepseek(made), {"quant_method": "fp8"}, expert_dtype="fp4"))


def config_groups(**changes):
    group = c.COMPRESSED["config_groups"]["group_0"] | changes
    return c.COMPRESSED | {"config_groups": {"group_0": group}}


def mixed(**layers):
    return {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}


REFUSED = {
    "awq": ({"quant_algo": "W4A16_NVFP4_AWQ"}, "pre_quant_scale divides the activations"),
    "awq nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "silently wrong"),
    "awq layer": (mixed(a={"quant_algo": "NVFP4_AWQ"}), "a is quantised with NVFP4_AWQ"),
    "mixed without layers": ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "quantized_layers"),
    "int8": (config_groups(weights={"num_bits": 8, "type": "int", "group_size": 16}), r"\(8, 'int', 16\)"),
    "group 32": (config_groups(weights={"num_bits": 4, "type": "float", "group_size": 32}), r"\(4, 'float', 32\)"),
    "format": (c.COMPRESSED | {"format": "pack-quantized"}, "'pack-quantized'"),
    "no groups": (c.COMPRESSED | {"config_groups": {}}, "config_groups"),
    "group size": (c.MODELOPT | {"group_size": 32}, "group_size 32"),
    "gptq": ({"quant_method": "gptq"}, "quant_method 'gptq'"),
    "fp8": ({"quant_method": "fp8"}, "quant_method 'fp8'"),
    "ignore": (c.MODELOPT | {"ignore": "lm_head"}, "must be a list"),
    "bad re": (c.MODELOPT | {"ignore": ["re:("]}, "no regular expression"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_known_is_refused_with_a_sentence(name, tmp_path):
    quantization, message = REFUSED[name]
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(c.write(tmp_path, c.modelopt(c.experts()), quantization))


def test_an_awq_tensor_is_refused_whatever_the_configuration_says(tmp_path):
    tensors = c.modelopt(c.experts())
    tensors["model.layers.0.mlp.experts.0.up_proj.pre_quant_scale"] = torch.ones(c.H)
    with pytest.raises(CheckpointError, match=r"0\.up_proj\.pre_quant_scale: this is an AWQ checkpoint"):
        Checkpoint.open(c.write(tmp_path, tensors))


def test_weight_only_and_ignore_lists_and_mixed_precision(tmp_path):
    a16 = Checkpoint.open(c.write(tmp_path / "a", c.compressed(c.experts()), config_groups(input_activations=None)))
    assert a16.quantization.weight_only and a16.quantization.algorithm == "W4A16_NVFP4"
    q = Checkpoint.open(
        c.write(
            tmp_path / "b", c.modelopt(c.experts()), c.MODELOPT | {"ignore": ["lm_head", "*self_attn*", r"re:.*gate\d"]}
        )
    ).quantization
    ignored = ("lm_head", "model.layers.0.self_attn.q_proj", "layers.3.gate7", "model.lm_head")
    assert all(q.ignores(name) for name in ignored) and not q.ignores("model.layers.0.mlp.gate_proj")
    layers = {"model.layers.0.mlp.experts.0.up_proj": {"quant_algo": "NVFP4"}, "model.x": {"quant_algo": "FP8"}}
    q = Checkpoint.open(c.write(tmp_path / "c", c.modelopt(c.experts()), mixed(**layers))).quantization
    assert [q.of(n) for n in ("layers.0.mlp.experts.0.up_proj", "x", "y")] == ["NVFP4", "FP8", None]


def test_hf_quant_config_is_read_where_config_has_none(tmp_path):
    folder = c.write(tmp_path, c.modelopt(c.experts()), quantization_config=None)
    with pytest.raises(CheckpointError, match="not quantised"):
        Checkpoint.open(folder)
    (folder / "hf_quant_config.json").write_text(
        '{"quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}}'
    )
    q = Checkpoint.open(folder).quantization
    assert (q.method, q.algorithm, q.ignore) == ("modelopt", "NVFP4", ("lm_head",))


def three_shards(folder):
    return c.write(folder, c.modelopt(c.experts()), shards=3), folder / "model.safetensors.index.json"


def test_shards_that_are_missing_or_unlisted_and_keys_in_two_files(tmp_path):
    folder, index = three_shards(tmp_path / "a")
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.safetensors cannot be read"):
        Checkpoint.open(folder)
    folder, index = three_shards(tmp_path / "b")
    listed = json.loads(index.read_text())
    listed["weight_map"] = {k: v for k, v in listed["weight_map"].items() if "00003-of" not in v}
    index.write_text(json.dumps(listed))
    with pytest.raises(CheckpointError, match=r"model-00003-of-00003\.safetensors is a shard that .* does not know"):
        Checkpoint.open(folder)
    folder, index = three_shards(tmp_path / "c")
    listed["weight_map"] = json.loads(index.read_text())["weight_map"] | {"extra": "model-00001-of-00003.safetensors"}
    index.write_text(json.dumps(listed))
    with pytest.raises(CheckpointError, match="1 keys only in the index, 0 only in the file, such as extra"):
        Checkpoint.open(folder)
    folder, index = three_shards(tmp_path / "d")
    index.unlink()
    assert Checkpoint.open(folder).layers[0].spec.num_experts == c.E  # no index is needed where all is there
    (folder / "again.safetensors").write_bytes((folder / "model-00001-of-00003.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match=r"is in model-00001-of-00003\.safetensors too; one of them must go"):
        Checkpoint.open(folder)


X = "model.layers.0.mlp.experts"
WRONG = {
    "float codes": ({f"{X}.1.up_proj.weight": torch.ones(c.I, c.H)}, r"1\.up_proj\.weight is F32; need U8 or I8"),
    "converted scales": ({f"{X}.1.up_proj.weight_scale": torch.ones(c.I, c.H // 16)}, r"is F32; need F8_E4M3 or U8"),
    "half global": ({f"{X}.1.up_proj.weight_scale_2": torch.ones((), dtype=torch.float16)}, "is F16; need F32"),
    "rows": ({f"{X}.1.up_proj.weight": torch.ones(c.I - 1, c.H // 2).byte()}, r"\(31, 32\); need \(32, 32\)"),
    "gap": ({f"{X}.900.up_proj.weight_scale_2": torch.ones(())}, "id 900"),
    "both ways": ({f"{X}.gate_up_proj": torch.ones(1, 2, 2).byte()}, "one by one, and all in one"),
    "k": ({k: torch.ones(*v.shape[:-1], 12).byte() if k.endswith("weight") else v
           for k, v in c.modelopt(c.experts()).items()}, "positive multiple of 16"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_is_refused_from_the_header_with_the_key(name, tmp_path):
    change, message = WRONG[name]
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(c.write(tmp_path, c.modelopt(c.experts()) | change))


@pytest.mark.parametrize(
    "key",
    [
        "model.layers.0.mlp.experts.0.gate_proj.k_scale", "model.layers.0.mlp.gate.weight",
        "model.layers.0.mlp.shared_experts.gate_proj.weight", "experts.x.up_proj.weight",
        "model.layers.0.mlp.experts.1234567.up_proj.weight", "model.experts.0.up_proj.weight.extra",
        "model.layers.0.mlp.experts.gate_up_proj_scale", "model.layers.0.mlp.experts.0.w1.blocks",
    ],
)  # fmt: skip
def test_other_keys_belong_to_no_expert(key):
    assert ExpertKey.parse(key) is None
