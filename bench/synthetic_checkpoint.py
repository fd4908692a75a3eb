"""Write an NVFP4 checkpoint with a real model's tensor names, but small: `python -m bench.synthetic_checkpoint DIR`.

The default has the names of Qwen3-235B-A22B: 94 layers x 128 experts x 3 projections x 4 keys. Codes and scales are
random but sound; --broken plants one fault of each kind that the inspection must find.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=94)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=128, help="4096 in the real model")
    parser.add_argument("--intermediate", type=int, default=48, help="1536 in the real model")
    parser.add_argument("--layers-per-shard", type=int, default=8)
    parser.add_argument("--broken", action="store_true")
    return parser.parse_args(argv)


def layer_tensors(layer: int, args: argparse.Namespace, rng: torch.Generator) -> dict[str, Tensor]:
    """All keys of one layer of experts; gate and up see one x, so they have one input_scale."""
    out = {}
    for e in range(args.experts):
        base, into, hidden = (torch.rand(3, generator=rng) * 0.5 + 0.5).tolist()
        for projection in PROJECTIONS:
            n, k = (args.intermediate, args.hidden)[:: -1 if projection == "down_proj" else 1]
            prefix = f"model.layers.{layer}.mlp.experts.{e}.{projection}"
            out[f"{prefix}.weight"] = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=rng)
            scale = torch.randint(0x30, 0x7E, (n, k // 16), dtype=torch.uint8, generator=rng)
            out[f"{prefix}.weight_scale"] = scale.view(torch.float8_e4m3fn)
            out[f"{prefix}.weight_scale_2"] = torch.rand((), generator=rng) * 2e-5 + base * 1e-4
            out[f"{prefix}.input_scale"] = torch.tensor((hidden if projection == "down_proj" else into) * 1e-2)
    return out


def plant(tensors: dict[str, Tensor], layer: int) -> None:
    """One fault of each kind, each in its own layer."""
    at = f"model.layers.{layer}.mlp.experts"
    if layer == 3:
        tensors[f"{at}.5.up_proj.input_scale"] = torch.tensor(0.0)
    if layer == 5:
        del tensors[f"{at}.9.down_proj.input_scale"]
    if layer == 7:
        tensors[f"{at}.2.gate_proj.weight_scale"].view(torch.uint8)[1, 1] = 0x7F
    if layer == 11:
        tensors[f"{at}.0.gate_proj.weight_scale_2"] = torch.tensor(26880.0)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    rng = torch.Generator().manual_seed(0)
    begin = time.perf_counter()
    weight_map: dict[str, str] = {}
    shards = -(-args.layers // args.layers_per_shard)
    for shard in range(shards):
        tensors: dict[str, Tensor] = {}
        first = shard * args.layers_per_shard
        for layer in range(first, min(first + args.layers_per_shard, args.layers)):
            mine = layer_tensors(layer, args, rng)
            if args.broken:
                plant(mine, layer)
            tensors |= mine
        name = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        save_file(tensors, args.out / name)
        weight_map |= dict.fromkeys(tensors, name)
    (args.out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    config = {
        "model_type": "qwen3_moe", "num_hidden_layers": args.layers, "num_experts": args.experts,
        "hidden_size": args.hidden, "moe_intermediate_size": args.intermediate,
        "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16},
    }  # fmt: skip
    (args.out / "config.json").write_text(json.dumps(config))
    size = sum(f.stat().st_size for f in args.out.iterdir())
    print(
        f"{args.out}: {len(weight_map)} keys, {shards} shards, {size / 1e9:.2f} GB, {time.perf_counter() - begin:.0f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
