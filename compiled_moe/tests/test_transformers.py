"""Plain ``from_pretrained`` against transformers' own models, for every architecture and format it is said to read."""

import json

import pytest
import torch

import compiled_moe
import nvfp4

from . import checkpoints as c
from . import test_loader as loader

transformers = pytest.importorskip("transformers")
IDS = loader.IDS
BASE = loader.SMALL | {"num_experts": 4, "n_routed_experts": 4, "moe_intermediate_size": 32}


def qwen3_moe():
    return transformers.Qwen3MoeConfig(**BASE)


def qwen3_next():
    return transformers.Qwen3NextConfig(
        **BASE, layer_types=["linear_attention", "full_attention"], shared_expert_intermediate_size=32,
        linear_key_head_dim=16, linear_value_head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4,
    )  # fmt: skip


def deepseek_v3():
    return transformers.DeepseekV3Config(
        **BASE | {"head_dim": 8, "num_key_value_heads": 4, "num_hidden_layers": 3}, first_k_dense_replace=1, n_group=2,
        topk_group=1, n_shared_experts=1, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16,
        v_head_dim=16, routed_scaling_factor=2.5,
    )  # fmt: skip


def glm4_moe():
    return transformers.Glm4MoeConfig(**BASE, first_k_dense_replace=1, n_group=1, topk_group=1, n_shared_experts=1)


def llama4():
    return transformers.Llama4TextConfig(
        **BASE | {"num_experts_per_tok": 1}, intermediate_size_mlp=32, interleave_moe_layer_step=1, moe_layers=[0, 1],
        attention_chunk_size=32,
    )  # fmt: skip


def nemotron_h():
    return transformers.NemotronHConfig(
        **{k: v for k, v in BASE.items() if k not in ("num_hidden_layers", "num_local_experts", "num_experts")},
        layers_block_type=["moe", "attention", "moe"], mlp_hidden_act="relu2", n_shared_experts=1, n_group=1,
        topk_group=1, moe_shared_expert_intermediate_size=32, mamba_num_heads=4, mamba_head_dim=16, ssm_state_size=16,
        n_groups=1, chunk_size=16, routed_scaling_factor=2.5,
    )  # fmt: skip


CONFIGS = {f.__name__: f for f in (qwen3_moe, qwen3_next, deepseek_v3, glm4_moe, llama4, nemotron_h)}


def _quantise(weight, projections):
    """[E, rows, K] cut into projections: (expert, projection) to tensors; weight becomes what they stand for."""
    made = {}
    for e, own in enumerate(weight):
        for projection, part in zip(projections, own.chunk(len(projections)), strict=True):
            made[e, projection], value = loader.quantized(part)
            made[e, projection]["input_scale"] = torch.tensor(0.01)
            part.copy_(value)
    return made


@torch.no_grad()
def modelopt(name):
    """A random model whose experts are what NVFP4 can say, and its checkpoint in ModelOpt's layout."""
    model = loader.random_model(CONFIGS[name]())
    tensors = {k: v for k, v in model.state_dict().items() if ".experts." not in k}
    for layer, module in model.named_modules():
        if not layer.endswith(".experts"):
            continue
        into = "gate_up_proj" if hasattr(module, "gate_up_proj") else "up_proj"
        halves = ("gate_proj", "up_proj") if into == "gate_up_proj" else ("up_proj",)
        turned = [p.transpose(1, 2) if name == "llama4" else p for p in (getattr(module, into), module.down_proj)]
        made = _quantise(turned[0], halves) | _quantise(turned[1], ("down_proj",))
        tensors |= c.modelopt(made, layer)
    return model, tensors, c.MODELOPT


def written(name, folder, shards=2, **changes):
    """The model and its folder; ``changes`` replace tensors, None removes."""
    if name in loader.FAMILIES:
        return loader.written(name, folder, **changes)
    model, tensors, quantization = modelopt(name)
    tensors = {k: v for k, v in (tensors | changes).items() if v is not None}
    config = json.loads(model.config.to_json_string()) | {"quantization_config": quantization, "dtype": "float32"}
    config.pop("experts_implementation", None)
    return model, c.write(folder, tensors, shards=shards, **config)


@pytest.fixture(autouse=True)
def as_it_was():
    """transformers' tables are its own before and after each test."""
    compiled_moe.register_transformers(methods=())
    yield
    compiled_moe.register_transformers(methods=())


def from_pretrained(folder, **kwargs):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **kwargs)


@torch.no_grad()
def distance(ours, theirs):
    a, b = ours(IDS).logits.double(), theirs(IDS).logits.double()
    assert float(b.norm()) > 1
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("name", [*CONFIGS, *loader.FAMILIES])
def test_from_pretrained_computes_the_dequantised_model_and_saves_it(name, tmp_path):
    theirs, folder = written(name, tmp_path / "a")
    compiled_moe.register_transformers()
    ours, info = from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    assert distance(ours, theirs) < 1e-4
    assert ours.nvfp4.report.ok and len(compiled_moe.experts_of(ours)) == len(ours.nvfp4.weights) > 0
    for module in compiled_moe.experts_of(ours).values():  # nobody put other memory into its buffers
        assert all(getattr(module, n).data_ptr() == t.data_ptr() for n, t in module.weights.tensors.items())
    ours.save_pretrained(tmp_path / "b")
    again, info = from_pretrained(tmp_path / "b", output_loading_info=True)
    assert not any(info.values()), info
    loaded = compiled_moe.load(tmp_path / "b", device="cpu", dtype=torch.float32)
    assert torch.equal(again(IDS).logits, ours(IDS).logits) and torch.equal(loaded(IDS).logits, ours(IDS).logits)


GRAPHS = {"gpt_oss": 2}
"""transformers' sliding cache makes a second graph when its window is full."""


@pytest.mark.parametrize("name", [n for n in (*CONFIGS, "mixtral", "gpt_oss") if n != "llama4"])
def test_static_generate_is_one_graph_and_the_same_tokens(name, tmp_path):
    _, folder = written(name, tmp_path)
    compiled_moe.register_transformers()
    model = from_pretrained(folder)
    args = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    eager = model.generate(IDS, **args)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    how = transformers.CompileConfig(fullgraph=True, backend="aot_eager", mode=None)
    how._compile_all_devices = True
    compiled = model.generate(IDS, cache_implementation="static", compile_config=how, **args)
    assert torch.equal(compiled, eager) and eager.shape[1] == IDS.shape[1] + 4
    counters = torch._dynamo.utils.counters
    assert not counters["graph_break"] and counters["stats"]["unique_graphs"] == GRAPHS.get(name, 1), counters


@torch.no_grad()
def test_llama4_compiles_whole_though_generate_leaves_it_eager(tmp_path):
    _, folder = written("llama4", tmp_path)
    compiled_moe.register_transformers()
    model = from_pretrained(folder)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(IDS, use_cache=False).logits, model(IDS, use_cache=False).logits)


def test_a_missing_scale_of_one_expert_is_refused_by_name(tmp_path):
    key = "model.layers.1.mlp.experts.2.up_proj.weight_scale_2"
    _, folder = written("qwen3_moe", tmp_path, **{key: None})
    compiled_moe.register_transformers()
    with pytest.raises(nvfp4.ScaleError, match=r"layers.1.mlp.experts, expert 2: up_proj.weight_scale_2 \[missing\]"):
        from_pretrained(folder)
    compiled_moe.register_transformers(policy="report")
    (finding,) = from_pretrained(folder).nvfp4.report.errors
    assert (finding.expert, finding.tensor, finding.kind) == (2, "weight_scale_2", "missing")


def test_only_what_the_precision_consumes_is_required(tmp_path):
    key = "model.layers.0.mlp.experts.3.down_proj.input_scale"
    theirs, folder = written("qwen3_moe", tmp_path, **{key: torch.tensor(0.0)})
    for precision, near in (("w4a16", 1e-4), ("w4a4_per_token", 0.3)):
        compiled_moe.register_transformers(precision)
        assert distance(from_pretrained(folder), theirs) < near
    compiled_moe.register_transformers("w4a4_static")
    with pytest.raises(nvfp4.ScaleError, match=r"expert 3: down_proj.input_scale = 0 \[zero\]"):
        from_pretrained(folder)
    compiled_moe.register_transformers("w4a4_static", repairs=("fill_activation_max",))
    assert distance(from_pretrained(folder), theirs) < 0.3


def test_saving_into_its_own_folder_keeps_the_tensors(tmp_path):
    _, folder = written("qwen3_moe", tmp_path, shards=1)
    before = compiled_moe.load(folder, device="cpu", dtype=torch.float32)(IDS).logits
    compiled_moe.register_transformers()
    from_pretrained(folder).save_pretrained(folder)
    assert torch.equal(from_pretrained(folder)(IDS).logits, before)
    kept = compiled_moe.load(folder, precision="w4a4_static", device="cpu").nvfp4.report
    assert kept.ok, "activation scales that w4a16 does not use are saved too"


def test_layers_that_the_model_class_does_without_are_left_out(tmp_path):
    """DeepSeek-V3's files hold one layer more, which predicts a second token."""
    extra = c.modelopt(c.experts(count=4), "model.layers.61.mlp.experts") | {"model.layers.61.x.weight": torch.ones(2)}
    theirs, folder = written("deepseek_v3", tmp_path, **extra)
    compiled_moe.register_transformers()
    assert distance(from_pretrained(folder), theirs) < 1e-4
    assert distance(compiled_moe.load(folder, device="cpu", dtype=torch.float32), theirs) < 1e-4


def test_a_folder_whose_config_says_nothing(tmp_path):
    """ModelOpt's older exports have hf_quant_config.json only, which transformers does not look at."""
    theirs, folder = written("qwen3_moe", tmp_path / "a")
    config = json.loads((folder / "config.json").read_text())
    said = config.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(config))
    separate = {"quant_algo": "NVFP4", "group_size": 16, "kv_cache_quant_algo": None, "exclude_modules": said["ignore"]}
    (folder / "hf_quant_config.json").write_text(json.dumps({"producer": {}, "quantization": separate}))
    compiled_moe.register_transformers()
    ours = from_pretrained(folder, quantization_config=compiled_moe.quantization_config(folder))
    assert distance(ours, theirs) < 1e-4
    ours.save_pretrained(tmp_path / "b")
    assert torch.equal(from_pretrained(tmp_path / "b")(IDS).logits, ours(IDS).logits)
    with pytest.raises(compiled_moe.CheckpointError, match=r"hf_quant_config\.json is missing"):
        compiled_moe.quantization_config(tmp_path / "b")


def test_other_checkpoints_of_the_same_method_stay_transformers_own():
    from transformers.quantizers.auto import AutoQuantizationConfig

    said = {"quant_method": "mxfp4", "dequantize": True}
    stock = AutoQuantizationConfig.from_dict(said)
    assert type(stock).__name__ == "Mxfp4Config"
    ours = {"quant_method": "compressed-tensors", **c.COMPRESSED}
    compiled_moe.register_transformers(methods=("modelopt", "compressed-tensors"))
    compiled_moe.register_transformers(methods=("modelopt", "compressed-tensors"))
    assert type(AutoQuantizationConfig.from_dict(said)) is type(stock)
    assert AutoQuantizationConfig.from_dict(ours).to_dict() == ours
    assert AutoQuantizationConfig.from_dict(c.MODELOPT).quant_method == "compiled-moe"
    other = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {}}
    try:
        theirs = AutoQuantizationConfig.from_dict(other)
    except ImportError as error:
        assert "compressed_tensors" in str(error).replace("-", "_")  # their own way, which needs their own package
    else:
        assert theirs.quant_method == "compressed-tensors"
    with pytest.raises(compiled_moe.CheckpointError, match="quant_algo 'FP8'"):
        AutoQuantizationConfig.from_dict({"quant_method": "modelopt", "quant_algo": "FP8"})
    compiled_moe.register_transformers()
    assert AutoQuantizationConfig.from_dict(said).quant_method == "compiled-moe"
    compiled_moe.register_transformers(methods=())
    assert type(AutoQuantizationConfig.from_dict(said)) is type(stock)
    with pytest.raises(ValueError, match="Unknown quantization type, got modelopt"):
        AutoQuantizationConfig.from_dict(c.MODELOPT)


def test_a_device_map_places_experts_by_their_longest_prefix():
    from compiled_moe.engines.transformers import _placement

    device_of = _placement({"": "cpu", "model.layers.1": 1, "model.layers.11": "meta"})
    assert [device_of(f"model.layers.{i}.mlp.experts").type for i in (0, 11, 2)] == ["cpu", "meta", "cpu"]
    assert device_of("model.layers.1.mlp.experts") == torch.device("cuda", 1)
    assert _placement(None)("x") == _placement("auto")("x") == torch.device("cpu")
    assert _placement(None, "cuda:1")("x") == torch.device("cuda", 1)
    assert _placement("cpu", "cuda:1")("x") == torch.device("cpu")
    with pytest.raises(compiled_moe.CheckpointError, match="to disk"):
        _placement({"": "cpu", "model.layers.3": "disk"})
