"""A tiny model and what NVIDIA ModelOpt makes of it, for tests: `python -m bench.peer_checkpoint --out DIR`.

Needs the package nvidia-modelopt, which runs on a CPU and is too heavy for every test run; so its export is kept in
compiled_moe/tests/data/modelopt, and made again and compared where the package is installed.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

OUT = Path(__file__).parents[1] / "compiled_moe" / "tests" / "data" / "modelopt"
SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 16, "moe_intermediate_size": 16, "num_hidden_layers": 1, "num_experts": 3,
    "num_experts_per_tok": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 32,
    "max_position_embeddings": 64, "decoder_sparse_step": 1, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip


def token_ids() -> torch.Tensor:
    """The calibration text, [4, 32]."""
    return torch.arange(128).reshape(4, 32).remainder(31) + 1


def source(folder: Path) -> Any:
    """Write the model in bfloat16; returns it in float32, as it was written."""
    generator = torch.Generator().manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**SIZES), dtype=torch.bfloat16)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.3 if p.dim() > 1 else torch.ones(p.shape))
    model.save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager").eval()


def exported(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    """Let ModelOpt quantise and write it; returns what ModelOpt says the experts' weights are, in bfloat16."""
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    model.config.architectures = [type(model).__name__]
    quantised = mtq.quantize(model, mtq.NVFP4_DEFAULT_CFG, lambda m: m(token_ids()))
    export_hf_checkpoint(quantised.bfloat16(), export_dir=folder)  # rounds the measured maxima to bfloat16 too
    tensors = load_file(folder / "model.safetensors")
    values = {}
    for key in [k for k in tensors if ".experts." in k and k.endswith(".weight")]:
        codes = tensors[key]
        packed = NVFP4QTensor(torch.Size((codes.shape[0], 2 * codes.shape[1])), torch.bfloat16, codes)
        values[key] = packed.dequantize(
            dtype=torch.bfloat16, scale=tensors[f"{key}_scale"], double_scale=tensors[f"{key}_scale_2"],
            block_sizes={-1: 16},
        )  # fmt: skip
    return values


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args(argv)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        values = exported(source(args.out / "source"), args.out / "export")
    save_file(values, args.out / "dequantised.safetensors")
    print(f"{args.out}: {sum(f.stat().st_size for f in args.out.rglob('*') if f.is_file())} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
