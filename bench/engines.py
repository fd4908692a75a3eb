"""transformers' own generate on our experts and on its bfloat16 ones: `python -m bench.engines --out FILE.json`.

Two models: the shipped one through plain from_pretrained, and a random one with the layer shapes of Qwen3-30B-A3B,
built on the device in NVFP4. Logits are compared before anything is timed. Step times come from a clock inside
generate, which waits for each token anyway; launches come from the profiler. `--small` runs all of it on a CPU.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import compiled_moe
import nvfp4
from bench.decode import seconds_a_token
from bench.record import RESULTS, write
from bench.shapes import SHAPES
from compiled_moe.decode import Decoder
from compiled_moe.unquantised import dequantised, unquantised

DIFFERENCE = 0.05
"""Relative L2 of bfloat16 logits between the two models; both round everything but the experts alike."""


class Clock:
    """A stopping criterion that never stops and notes when it was asked."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    @property
    def steps(self) -> list[float]:
        """Seconds of each decode step; the prompt's is not among them."""
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]


def generate(model: Any, ids: Tensor, tokens: int, compiled: bool) -> Clock:
    """Greedy tokens by transformers' loop; compiled is a static cache, fullgraph, reduce-overhead."""
    from transformers import CompileConfig, StoppingCriteriaList

    how: dict[str, Any] = {}
    if compiled:
        config: Any = CompileConfig(fullgraph=True, mode="reduce-overhead" if ids.is_cuda else "default")
        config._compile_all_devices = True
        how = {"cache_implementation": "static", "compile_config": config}
    clock = Clock()
    model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False,
        pad_token_id=0, stopping_criteria=StoppingCriteriaList([clock]), **how,
    )  # fmt: skip
    return clock


def host_calls(model: Any, ids: Tensor, tokens: int) -> dict[str, float]:
    """CUDA calls per decode step of a compiled generate, by name."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        generate(model, ids, tokens, compiled=True)
    names = Counter(e.name for e in profiler.events() if re.match(r"cu(da)?[A-Z]", e.name))
    return {name: round(count / (tokens - 1), 2) for name, count in sorted(names.items())}


def measure(model: Any, ids: Tensor, tokens: int) -> dict[str, Any]:
    """Step times eager and compiled, launches, memory."""
    found: dict[str, Any] = {}
    for name, compiled in (("eager", False), ("compiled", True)):
        begin = time.perf_counter()
        generate(model, ids, tokens if compiled else 8, compiled)
        found[f"{name}_warmup_seconds"] = time.perf_counter() - begin
        steps = generate(model, ids, tokens, compiled).steps[4:]
        found[f"{name}_step_ms"] = 1e3 * statistics.median(steps)
        found[f"{name}_step_ms_p90"] = 1e3 * statistics.quantiles(steps, n=10)[-1]
    if ids.is_cuda:
        calls = host_calls(model, ids, tokens)
        found["host_calls_per_step"], found["graph_launches_per_step"] = calls, calls.get("cudaGraphLaunch", 0)
    return found


def decoder_step_ms(model: Any, ids: Tensor, tokens: int, rounds: int) -> float:
    """The same model in compiled_moe.decode: the step alone, without transformers' loop around it."""
    decoder = Decoder(model, ids.shape[1] + tokens + 8)
    decoder.warmup(ids[0])
    return 1e3 * statistics.median(seconds_a_token(decoder, ids[0], tokens) for _ in range(rounds))


def expert_bytes(model: nn.Module) -> int:
    """Bytes of all experts modules of either model."""
    modules = [m for name, m in model.named_modules() if name.endswith(".experts")]
    return sum(t.nbytes for m in modules for t in (*m.parameters(), *m.buffers()))


def shipped(device: str) -> tuple[Any, Any]:
    """The shipped model through from_pretrained, and transformers' own with the dequantised experts."""
    from transformers import AutoModelForCausalLM

    compiled_moe.register_transformers(device=device)
    ours: Any = AutoModelForCausalLM.from_pretrained(compiled_moe.DEMO, dtype=torch.bfloat16)
    ours = ours.to(device)
    return ours, unquantised(ours, "grouped_mm")


@torch.no_grad()
def qwen3(layers: int, device: str, small: bool) -> tuple[Any, Any]:
    """Random models of one kind that hold the same weights: experts in NVFP4, and dequantised for grouped_mm."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    shape = SHAPES["Qwen3-30B-A3B"]
    hidden, inter, experts = (256, 96, 8) if small else (shape.hidden, shape.inter, shape.experts)
    sizes: dict[str, Any] = dict(
        hidden_size=hidden, moe_intermediate_size=inter, num_experts=experts, num_local_experts=experts,
        num_experts_per_tok=4 if small else shape.top_k, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=4, head_dim=16 if small else 128, vocab_size=512 if small else 151936, norm_topk_prob=True,
        tie_word_embeddings=False, max_position_embeddings=4096,
    )  # fmt: skip
    config = Qwen3MoeConfig(**sizes)
    torch.manual_seed(0)
    theirs: Any
    ours: Any
    with torch.device(device):
        theirs = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, experts_implementation="grouped_mm")
    with torch.device("meta"):
        ours = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for i, layer in enumerate(theirs.model.layers):
        weights, _ = nvfp4.finalize(random_experts(f"model.layers.{i}.mlp.experts", experts, hidden, inter, device))
        for name, value in dequantised(weights).items():
            getattr(layer.mlp.experts, name).copy_(value)
        ours.set_submodule(f"model.layers.{i}.mlp.experts", compiled_moe.NVFP4Experts(weights))
    ours.load_state_dict({k: v for k, v in theirs.state_dict().items() if ".experts." not in k}, assign=True)
    ours.model.rotary_emb = type(ours.model.rotary_emb)(config).to(device)
    return ours.eval().requires_grad_(False), theirs.eval().requires_grad_(False)


def random_experts(name: str, experts: int, hidden: int, inter: int, device: str) -> nvfp4.RawExperts:
    """Random codes under moderate scales, in slots that finalize takes."""
    raw = nvfp4.RawExperts(experts, hidden, inter, layer=name, device=device)
    for part in ("w13", "w2"):
        raw.tensors[part].random_(0, 256)
        raw.tensors[f"{part}_block_scale"].random_(0x30, 0x40)
    raw.tensors["w13_global_scale"].fill_(0.25 * hidden**-0.5)
    raw.tensors["w2_global_scale"].fill_(0.25 * inter**-0.5)
    for e in range(experts):
        for projection in raw.spec.projections:
            for tensor in ("weight", "weight_scale", "weight_scale_2"):
                raw.note(e, projection, tensor, "random")
    return raw


@torch.no_grad()
def logits_difference(ours: Any, theirs: Any, ids: Tensor) -> float:
    a, b = ours(ids).logits.double(), theirs(ids).logits.double()
    return float((a - b).norm() / b.norm())


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", default="shipped,qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="tiny sizes, to see that all of it runs")
    parser.add_argument("--out", type=Path, default=RESULTS / "engines_h200.json")
    args = parser.parse_args(argv)
    if args.small:
        args.layers, args.tokens, args.rounds = 1, 16, 1
    makers = {
        "shipped": lambda: shipped(args.device),
        "qwen3-30b-a3b": lambda: qwen3(args.layers, args.device, args.small),
    }
    results: dict[str, Any] = {"batch": args.batch, "prompt": args.prompt, "tokens": args.tokens, "layers": args.layers}
    sound = True
    for name in args.models.split(","):
        ours, theirs = makers[name]()
        vocabulary = ours.config.vocab_size
        ids = torch.randint(3, vocabulary, (args.batch, args.prompt), generator=torch.Generator().manual_seed(0))
        ids = ids.to(args.device)
        difference = logits_difference(ours, theirs, ids)
        sound &= difference < DIFFERENCE
        found: dict[str, Any] = {"logits_difference": difference}
        print(f"{name}: logits differ by {difference:.4f} (at most {DIFFERENCE})")
        models = {"ours": ours, "transformers grouped_mm bfloat16": theirs}
        for who, model in models.items():
            found[who] = measure(model, ids, args.tokens) | {"expert_bytes": expert_bytes(model)}
            found[who]["model_bytes"] = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
            if args.batch == 1 and name != "shipped":  # bench.decode has that
                found[who]["decoder_step_ms"] = decoder_step_ms(model, ids, args.tokens, args.rounds)
            print(f"  {who}: " + ", ".join(f"{k} {v:.3f}" for k, v in found[who].items() if isinstance(v, float)))
        a, b = (found[who] for who in models)
        found["backend"] = next(iter(compiled_moe.experts_of(ours).values())).weights.backend
        found["expert_bytes_over_bf16"] = a["expert_bytes"] / b["expert_bytes"]
        found["compiled_times_faster_than_eager_bf16"] = b["eager_step_ms"] / a["compiled_step_ms"]
        found["times_faster"] = {k: b[k] / a[k] for k in a if k.endswith("step_ms")}
        print(f"  times faster {found['times_faster']}, expert bytes {found['expert_bytes_over_bf16']:.3f}")
        results[name] = found
        del ours, theirs, models, model
        torch._dynamo.reset()
        if args.device == "cuda":
            torch.cuda.empty_cache()
    write(args.out, "python -m bench.engines", sound=sound, **results)
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
