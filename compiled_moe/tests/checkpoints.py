"""Small checkpoints of every format and naming family, all of one layer of random experts."""

import json
from typing import Any

import torch
from safetensors.torch import save_file

from nvfp4 import quantize
from nvfp4.format import encode_e2m1, pack

E, H, I = 3, 64, 32
GATED = ("gate_proj", "up_proj", "down_proj")
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"]}
COMPRESSED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "ignore": ["lm_head", "re:.*gate$"],
    "config_groups": {
        "group_0": {
            "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
            "input_activations": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
        }
    },
}
W = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def shape(projection, h=H, i=I):
    return (h, i) if projection == "down_proj" else (i, h)


def experts(projections=GATED, seed=0, count=E, h=H, i=I):
    """(expert, projection) to the four canonical tensors; global scales survive two reciprocals exactly."""
    rng = torch.Generator().manual_seed(seed)
    made = {}
    for e in range(count):
        for projection in projections:
            w = torch.randn(shape(projection, h, i), generator=rng) * 0.05
            scale = 1 / (2688 / w.abs().amax())
            codes, block_scale = quantize(w, scale)
            made[e, projection] = {
                "weight": codes,
                "weight_scale": block_scale.view(torch.float8_e4m3fn),
                "weight_scale_2": scale,
                "input_scale": 1 / (2688 / (torch.rand((), generator=rng) + 1)),
            }
    return made


def modelopt(made, layer="model.layers.0.mlp.experts", names=None):
    names = names or {}
    return {
        f"{layer}.{e}.{names.get(projection, projection)}.{tensor}": value
        for (e, projection), tensors in made.items()
        for tensor, value in tensors.items()
    }


def compressed(made, layer="model.layers.0.mlp.experts"):
    out = {}
    for (e, projection), t in made.items():
        prefix = f"{layer}.{e}.{projection}"
        out[f"{prefix}.weight_packed"] = t["weight"]
        out[f"{prefix}.weight_scale"] = t["weight_scale"]
        out[f"{prefix}.weight_global_scale"] = (1 / t["weight_scale_2"]).reshape(1)
        if "input_scale" in t:
            out[f"{prefix}.input_global_scale"] = (1 / t["input_scale"]).reshape(1)
    return out


def fused(made, layer="model.layers.0.feed_forward.experts", turned=True):
    """Llama-4's layout: one tensor a projection, [experts, in, out]; gate and up share their global scales."""
    out = {}

    def put(name, codes, scales, g, a):
        codes, scales = torch.stack(codes), torch.stack([s.view(torch.uint8) for s in scales])
        if turned:
            codes, scales = codes.transpose(1, 2).contiguous(), scales.transpose(1, 2).contiguous()
        out[f"{layer}.{name}"] = codes
        out[f"{layer}.{name}_weight_scale"] = scales.view(torch.float8_e4m3fn)
        out[f"{layer}.{name}_weight_scale_2"] = g
        out[f"{layer}.{name}_input_scale"] = a

    count = 1 + max(e for e, _ in made)
    for name, projections in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
        codes = [torch.cat([made[e, p]["weight"] for p in projections]) for e in range(count)]
        scales = [torch.cat([made[e, p]["weight_scale"].view(torch.uint8) for p in projections]) for e in range(count)]
        first = [made[e, projections[0]] for e in range(count)]
        put(name, codes, scales, torch.stack([f["weight_scale_2"] for f in first]), first[0]["input_scale"])
    return out


def mx(w):
    """Quantise [N, K] to MXFP4: packed codes [N, K/2] and E8M0 bytes [N, K/32]."""
    blocks = w.unflatten(1, (-1, 32))
    power = blocks.abs().amax(-1).log2().floor() - 2
    return pack(encode_e2m1((blocks / torch.exp2(power)[..., None]).flatten(1))), (power + 127).to(torch.uint8)


def mx_experts(seed=0, count=E, h=H, i=I):
    rng = torch.Generator().manual_seed(seed)
    return {(e, p): mx(torch.randn(shape(p, h, i), generator=rng) * 0.05) for e in range(count) for p in GATED}


def gpt_oss(made, layer="model.layers.0.mlp.experts", bias=None):
    """OpenAI's layout: gate and up rows interleaved, blocks of 16 bytes."""
    out = {}
    count = 1 + max(e for e, _ in made)

    def woven(index):
        pairs = [(made[e, "gate_proj"][index], made[e, "up_proj"][index]) for e in range(count)]
        return torch.stack([torch.stack(pair, 1).flatten(0, 1) for pair in pairs])

    both = {
        "gate_up_proj": (woven(0), woven(1)),
        "down_proj": tuple(torch.stack([made[e, "down_proj"][j] for e in range(count)]) for j in (0, 1)),
    }
    for name, (codes, scales) in both.items():
        out[f"{layer}.{name}_blocks"] = codes.unflatten(2, (-1, 16))
        out[f"{layer}.{name}_scales"] = scales
    for name, value in (bias or {}).items():
        out[f"{layer}.{name}_bias"] = value
    return out


def deepseek(made, layer="layers.0.ffn.experts"):
    out = {}
    for (e, projection), (codes, scales) in made.items():
        out[f"{layer}.{e}.{W[projection]}.weight"] = codes.view(torch.int8)
        out[f"{layer}.{e}.{W[projection]}.scale"] = scales.view(torch.float8_e8m0fnu)
    return out


def write(folder, tensors, quantization=None, shards=1, **config):
    """A folder with config.json, shards and, for more than one, their index."""
    folder.mkdir(parents=True, exist_ok=True)
    body = {"model_type": "qwen3_moe", "quantization_config": quantization or MODELOPT} | config
    (folder / "config.json").write_text(json.dumps(body))
    tensors = {name: value.contiguous().clone() for name, value in tensors.items()}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    names = [f"model-{s + 1:05d}-of-{shards:05d}.safetensors" for s in range(shards)]
    where = {key: names[i % shards] for i, key in enumerate(tensors)}
    for name in names:
        save_file({k: v for k, v in tensors.items() if where[k] == name}, folder / name)
    index = {"metadata": {"total_size": 0}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
