"""Whole models of other families and formats against transformers' own, and the account of every key."""

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

import compiled_moe
import nvfp4
from nvfp4.format import dequantize_blocks, scale_of_amax, unpack

from . import checkpoints as c

transformers = pytest.importorskip("transformers")
IDS = torch.tensor([[5, 9, 2, 77, 31, 8, 64, 3, 3, 90]])
SMALL = {
    "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128, "max_position_embeddings": 64,
    "num_local_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": False, "pad_token_id": 0,
}  # fmt: skip


def quantized(w):
    """Canonical tensors of [N, K], and what they dequantise to."""
    g = scale_of_amax(w.abs().amax())
    codes, scale = nvfp4.quantize(w.contiguous(), g)
    tensors = {"weight": codes, "weight_scale": scale.view(torch.float8_e4m3fn), "weight_scale_2": g}
    return tensors, dequantize_blocks(codes, scale) * g


def random_model(config):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(0.0, 0.1) if p.dim() > 1 or "bias" in name or "sinks" in name else p.fill_(1.0)
    return model


def others(model, skip=("experts.",)):
    return {k: v for k, v in model.state_dict().items() if not any(s in k for s in skip)}


@torch.no_grad()
def mixtral():
    """One key an expert under block_sparse_moe, w1, w2, w3."""
    model = random_model(transformers.MixtralConfig(**SMALL))
    tensors = {k.replace(".mlp.", ".block_sparse_moe."): v for k, v in others(model).items()}
    for i, layer in enumerate(model.model.layers):
        experts = layer.mlp.experts
        for e in range(4):
            parts = zip(("w1", "w3", "w2"), (*experts.gate_up_proj[e].chunk(2), experts.down_proj[e]), strict=True)
            for name, w in parts:
                made, value = quantized(w)
                w.copy_(value)
                prefix = f"model.layers.{i}.block_sparse_moe.experts.{e}.{name}"
                tensors |= {f"{prefix}.{key}": t for key, t in made.items()}
    return model, tensors, c.MODELOPT


@torch.no_grad()
def gpt_oss():
    """MXFP4 in OpenAI's layout, with biases and the clamped activation."""
    config = transformers.GptOssConfig(**SMALL, layer_types=["full_attention", "sliding_attention"], sliding_window=16)
    model = random_model(config)
    tensors = others(model, skip=("experts.gate_up_proj", "experts.down_proj"))
    for i, layer in enumerate(model.model.layers):
        experts, layer_name = layer.mlp.experts, f"model.layers.{i}.mlp.experts"
        for name in ("gate_up_proj", "down_proj"):
            w = getattr(experts, name)  # [E, in, out]
            pairs = [c.mx(w[e].T) for e in range(4)]
            for e, (codes, scale) in enumerate(pairs):
                w[e] = (unpack(codes) * torch.exp2(scale.float() - 127).repeat_interleave(32, 1)).T
            tensors[f"{layer_name}.{name}_blocks"] = torch.stack([p[0] for p in pairs]).unflatten(2, (-1, 16))
            tensors[f"{layer_name}.{name}_scales"] = torch.stack([p[1] for p in pairs])
            tensors[f"{layer_name}.{name}_bias"] = getattr(experts, f"{name}_bias")
    return model, tensors, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


@torch.no_grad()
def dense_qwen():
    """NVFP4 attention and lm_head beside NVFP4 experts, in compressed-tensors' convention, without "model."."""
    small = {k: v for k, v in SMALL.items() if k != "num_local_experts"} | {"moe_intermediate_size": 32}
    model = random_model(transformers.Qwen3MoeConfig(**small, num_experts=4, decoder_sparse_step=1))
    tensors = others(model, skip=("experts.", "_proj.weight", "lm_head"))
    linears = {n: m for n, m in model.named_modules() if n.endswith("_proj") or n == "lm_head"}
    made = {}
    for name, module in linears.items():
        made[name], value = quantized(module.weight)
        module.weight.copy_(value)
    for i, layer in enumerate(model.model.layers):
        experts = layer.mlp.experts
        for e in range(4):
            parts = zip(c.GATED, (*experts.gate_up_proj[e].chunk(2), experts.down_proj[e]), strict=True)
            for projection, w in parts:
                made[f"model.layers.{i}.mlp.experts.{e}.{projection}"], value = quantized(w)
                w.copy_(value)
    for name, t in made.items():
        t["weight_scale_2"] = 1 / (1 / t["weight_scale_2"])
        tensors |= {
            f"{name}.weight_packed": t["weight"], f"{name}.weight_scale": t["weight_scale"],
            f"{name}.weight_global_scale": (1 / t["weight_scale_2"]).reshape(1),
        }  # fmt: skip
    group = c.COMPRESSED["config_groups"]["group_0"] | {"input_activations": None}
    quantization = c.COMPRESSED | {"config_groups": {"group_0": group}, "ignore": ["re:.*mlp.gate$"]}
    return model, {k.removeprefix("model."): v for k, v in tensors.items()}, quantization


FAMILIES = {"mixtral": mixtral, "gpt_oss": gpt_oss, "dense_qwen": dense_qwen}


def written(family, folder, **changes):
    model, tensors, quantization = FAMILIES[family]()
    tensors = {k: v for k, v in (tensors | changes).items() if v is not None}
    config = json.loads(model.config.to_json_string()) | {"quantization_config": quantization, "dtype": "float32"}
    config.pop("experts_implementation", None)
    return model, c.write(folder, tensors, shards=2, **config)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_the_dequantised_model(family, tmp_path):
    theirs, folder = written(family, tmp_path)
    ours = compiled_moe.load(folder, device="cpu", dtype=torch.float32)
    with torch.no_grad():
        a, b = ours(IDS).logits.double(), theirs(IDS).logits.double()
    assert float((a - b).norm() / b.norm()) < 1e-4 and float(b.norm()) > 1
    dense = [m for m in ours.modules() if isinstance(m, compiled_moe.NVFP4Linear)]
    assert len(dense) == (9 if family == "dense_qwen" else 0) == ours.nvfp4.report.dense


Q = "layers.0.self_attn.q_proj"
FP8 = torch.float8_e4m3fn
NOWHERE = {"layers.9.x.weight_packed": torch.ones(16, 8).byte(), "layers.9.x.weight_scale": torch.ones(16, 1).byte()}
AGAIN = c.modelopt(c.experts(count=4), "model.layers.0.mlp.experts")
FIFTH = {k: v for k, v in c.modelopt(c.experts(count=5), "layers.0.mlp.experts").items() if ".4." in k}
SCALE, CHECKPOINT, SHAPE = nvfp4.ScaleError, compiled_moe.CheckpointError, nvfp4.ShapeError
FAULTS = {
    "dense nan": ({f"{Q}.weight_global_scale": torch.tensor([float("nan")])}, SCALE, "q_proj: weight_scale_2"),
    "dense multiplier": ({f"{Q}.weight_global_scale": torch.tensor([1e-4])}, SCALE, "encode factor"),
    "dense missing": ({f"{Q}.weight_global_scale": None}, SCALE, "q_proj: weight_scale_2 .missing"),
    "dense twice": ({f"{Q}.weight_scale_2": torch.tensor(1e-4)}, SCALE, "written 2 times"),
    "dense shape": ({f"{Q}.weight_scale": torch.ones(64, 3).to(FP8)}, SHAPE, "never converted"),
    "no such module": (NOWHERE, CHECKPOINT, "no module"),
    "fp8": ({"layers.0.mlp.gate.weight": torch.ones(4, 64).to(FP8)}, CHECKPOINT, "is F8_E4M3 .* known as NVFP4 only"),
    "slot twice": ({"model.norm.weight": torch.ones(64)}, CHECKPOINT, "norm.weight was filled before"),
    "experts twice": (AGAIN, CHECKPOINT, "the checkpoint holds it twice"),
    "count": (FIFTH, CHECKPOINT, "the files hold 5 experts"),
    "nobody's key": (
        {"layers.0.self_attn.alibi": torch.ones(4)},
        CHECKPOINT,
        r"1 keys have no place in the model: model-0000.-of-00002\.safetensors:layers\.0\.self_attn\.alibi",
    ),
    "in no file": (
        {"layers.1.input_layernorm.weight": None},
        CHECKPOINT,
        r"1 tensors of the model are in no file: model\.layers\.1\.input_layernorm\.weight",
    ),
    "norm shape": (
        {"norm.weight": torch.ones(32)},
        CHECKPOINT,
        r"norm\.weight is F32 \(32,\), but model\.norm\.weight needs",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_names_its_key(fault, tmp_path):
    changes, error, message = FAULTS[fault]
    with pytest.raises(error, match=message):
        compiled_moe.load(written("dense_qwen", tmp_path, **changes)[1], device="cpu")


@pytest.mark.parametrize("family", FAMILIES)
def test_progress_counts_bytes_up_to_all_of_them(family, tmp_path):
    unused = {"model.layers.0.self_attn.k_proj.k_scale": torch.ones(())}
    _, folder = written(family, tmp_path, **unused)
    seen: list[tuple[int, int]] = []
    model = compiled_moe.load(folder, device="cpu", progress=lambda done, total: seen.append((done, total)))
    total = sum(t.nbytes for file in folder.glob("*.safetensors") for t in load_file(file).values())
    assert model.nvfp4.checkpoint.tensor_bytes == total and {t for _, t in seen} == {total}
    done = [d for d, _ in seen]
    assert done == sorted(done) and done[-1] == total and done[len(done) // 2] < total and done[-2] > 0.9 * total


@pytest.mark.parametrize("kind", ["truncated", "gone"])
def test_a_broken_shard_is_named_with_what_to_do(kind, tmp_path):
    _, folder = written("mixtral", tmp_path)
    shard = folder / "model-00002-of-00002.safetensors"
    if kind == "gone":
        shard.unlink()
    else:
        shard.write_bytes(shard.read_bytes()[:-100])
    message = (
        r"model-00002-of-00002\.safetensors cannot be read as safetensors: .*fetch this file again; the others may"
    )
    with pytest.raises(compiled_moe.CheckpointError, match=message):
        compiled_moe.load(folder, device="cpu")


def test_a_module_on_the_ignore_list_may_not_be_quantised(tmp_path):
    _, folder = written("dense_qwen", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["ignore"].append("*.q_proj")
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(compiled_moe.CheckpointError, match=r"q_proj.weight_packed is NVFP4, but .* ignore list"):
        compiled_moe.load(folder, device="cpu")


PEAK = """
import sys, torch, compiled_moe, transformers
from pathlib import Path
def kib(name):
    return int(next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith(name)).split()[1])
compiled_moe.load(device="cpu")  # libraries, kernels and arenas are there before we count
Path("/proc/self/clear_refs").write_text("5")
before = kib("VmRSS")
model = compiled_moe.load(sys.argv[1], device="cpu")
held = sum(p.nbytes for p in model.parameters()) + model.nvfp4.expert_bytes
print(kib("VmHWM") - before, held // 1024)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_host_memory_is_the_model_one_shard_and_one_expert(tmp_path):
    """Experts of 1.8 MB in four shards of 42 MB; 12 MiB are left for what Python and the allocator do meanwhile."""
    from bench import synthetic_checkpoint

    sizes = {"layers": 4, "experts": 24, "hidden": 1024, "intermediate": 1024, "layers-per-shard": 1}
    synthetic_checkpoint.main([str(tmp_path), *(word for k, v in sizes.items() for word in (f"--{k}", str(v)))])
    small = {k: v for k, v in SMALL.items() if k not in ("num_local_experts", "intermediate_size")}
    small |= {"hidden_size": 1024, "moe_intermediate_size": 1024, "num_hidden_layers": 4, "num_experts": 24}
    config = transformers.Qwen3MoeConfig(**small, decoder_sparse_step=1)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    tensors = {k: torch.ones(v.shape) for k, v in others(model).items()}
    save_file(tensors, tmp_path / "model-rest.safetensors")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    index["weight_map"] |= dict.fromkeys(tensors, "model-rest.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    config = json.loads(model.config.to_json_string()) | {"quantization_config": c.MODELOPT}
    (tmp_path / "config.json").write_text(json.dumps(config))
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}  # freed memory goes back: glibc's heap is not ours to count
    done = subprocess.run([sys.executable, "-c", PEAK, str(tmp_path)], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    growth, weights = map(int, done.stdout.split()[-2:])
    shard, expert = weights / 4, weights / 4 / 24
    assert weights > 150 * 1024 and growth < weights + shard + expert + 12 * 1024 < weights + 1.5 * shard, (
        growth,
        weights,
    )
