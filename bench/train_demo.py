"""Train the demo model, a byte-level Qwen3-MoE, on the standard library: `python -m bench.train_demo --out DIR`.

The weights that compute are bfloat16, AdamW moves a float32 master copy. There is no auxiliary loss: experts that the
router abandons stay abandoned, and `train.json` counts the tokens of each.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import platform
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from transformers import ByT5Tokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

from bench.bits_per_byte import END_OF_TEXT, bits_per_byte, encode
from bench.stdlib_text import HELDOUT_LIMIT, SourceFile, heldout_text, manifest, random_windows, read_sources

EXPERTS = ("grouped_mm", "eager")  # transformers' implementations in order of speed; the first that is right is used
LOG_EVERY = 50


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True, type=Path, help="folder to write")
    parser.add_argument("--steps", type=int, default=2400, help="steps, unless the time is up before")
    parser.add_argument("--seconds", type=float, default=150, help="cap on the time of the steps, compilation excluded")
    parser.add_argument("--batch", type=int, default=64, help="windows a step")
    parser.add_argument("--window", type=int, default=512, help="bytes a window")
    parser.add_argument("--lr", type=float, default=1.5e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--heldout-limit", type=int, default=HELDOUT_LIMIT, help="bytes of held-out text at most")
    parser.add_argument("--stdlib", type=Path, help="folder of another Python's standard library")
    parser.add_argument("--stdlib-version", help="version of that Python")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    return parser.parse_args(argv)


def build(args: argparse.Namespace) -> tuple[Qwen3MoeForCausalLM, list[torch.Tensor]]:
    """Return the model in bfloat16 and the float32 master copy of its parameters, in the same order."""
    hidden, layers = 256, 4
    config = Qwen3MoeConfig(
        vocab_size=len(ByT5Tokenizer()),
        hidden_size=hidden,
        intermediate_size=hidden,
        moe_intermediate_size=hidden,
        num_hidden_layers=layers,
        num_experts=16,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        initializer_range=0.5 * hidden**-0.5,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=END_OF_TEXT,
    )
    torch.manual_seed(args.seed)
    model = Qwen3MoeForCausalLM(config)
    for name, parameter in model.named_parameters():
        if (
            "embed_tokens" in name
        ):  # as large as what the layers add: a token's identity, not its context, routes at first
            parameter.data.mul_(0.3 / config.initializer_range)
        if "o_proj" in name or "down_proj" in name:  # the 2 x layers writers to the residual stream share its variance
            parameter.data.mul_((2 * layers) ** -0.5)
    model.to(args.device)
    masters = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter in model.parameters():  # not model.to(bfloat16): the rotary frequencies stay float32
        parameter.data = parameter.data.bfloat16()
    return model, masters


def choose_experts(model: Qwen3MoeForCausalLM) -> str:
    """Set the first expert implementation whose output and gradients agree with the eager loop on one layer."""

    def probe(implementation: str) -> list[torch.Tensor]:
        model.set_experts_implementation(implementation)
        x = torch.randn(2, 512, model.config.hidden_size, generator=torch.Generator().manual_seed(1)).bfloat16()
        block = copy.deepcopy(model.model.layers[0].mlp)
        y = block(x.to(model.device).requires_grad_())
        y = y[0] if isinstance(y, tuple) else y
        y.float().square().sum().backward()
        experts = block.experts
        return [
            t.detach().float() for t in (y, experts.gate_up_proj.grad, experts.down_proj.grad, block.gate.weight.grad)
        ]

    truth = probe("eager")
    for implementation in EXPERTS:
        try:
            error = max(float((a - b).norm() / b.norm()) for a, b in zip(probe(implementation), truth, strict=True))
        except Exception as failure:  # whatever a backend raises, the next one is tried, and this line says so
            print(f"experts: {implementation} raised {type(failure).__name__}: {str(failure)[:300]}", flush=True)
            continue
        print(f"experts: {implementation}, relative error against the eager loop {error:.1e}", flush=True)
        if error < 0.02:
            return implementation
    raise RuntimeError("no expert implementation agrees with the eager loop")


def make_step(model: Qwen3MoeForCausalLM, ids: torch.Tensor, compiled: bool) -> tuple[Callable, str]:
    """Return f(ids) -> mean loss in nats, compiled where that works, and "compiled" or "eager"."""

    def loss(ids: torch.Tensor) -> torch.Tensor:
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())

    if compiled:
        try:
            fast = torch.compile(loss, dynamic=False)
            value = fast(ids)
            value.backward()
            plain = loss(ids).item()
            if abs(value.item() - plain) < 0.02:
                model.zero_grad(set_to_none=True)
                return fast, "compiled"
            print(f"compile: loss {value.item():.4f} against {plain:.4f} eager; training eager", flush=True)
        except Exception as failure:  # a missing C compiler, an operator without a lowering: train without, and say so
            print(f"compile: {type(failure).__name__}: {str(failure)[:300]}; training eager", flush=True)
    model.zero_grad(set_to_none=True)
    return loss, "eager"


def learning_rate(progress: float, peak: float, warmup: float = 0.04, floor: float = 0.02) -> float:
    """Linear warm-up, then a cosine from the peak down to `floor` times the peak at progress 1."""
    if progress < warmup:
        return peak * (progress + 1e-3) / warmup
    return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * (progress - warmup) / (1 - warmup))))


def train(model: Qwen3MoeForCausalLM, masters: list[torch.Tensor], data: Iterator, step: Callable, args) -> dict:
    """Run the steps, or as many as the time allows: whichever ends first also ends the cosine."""
    parameters: list[torch.Tensor] = list(model.parameters())
    matrices, vectors = [m for m in masters if m.ndim > 1], [m for m in masters if m.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=args.device.startswith("cuda"))
    stopped: list[str] = []
    for number in (signal.SIGINT, signal.SIGTERM):  # a run that is told to stop still saves what it has
        signal.signal(number, lambda received, _frame: stopped.append(signal.Signals(received).name))
    curve, losses, done = [], [], 0
    begin = time.perf_counter()
    while done < args.steps and not stopped:
        elapsed = time.perf_counter() - begin
        progress = max(done / args.steps, elapsed / args.seconds)
        if progress >= 1:
            stopped.append("seconds")
            break
        lr = learning_rate(progress, args.lr)
        for group in optimizer.param_groups:
            group["lr"] = lr
        loss = step(next(data))
        loss.backward()
        losses.append(loss.detach())
        for parameter, master in zip(parameters, masters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(parameters, masters)
        done += 1
        if done % LOG_EVERY == 0 or done == args.steps:
            bits = float(torch.stack(losses).mean()) / math.log(2)
            elapsed = round(time.perf_counter() - begin, 2)
            curve.append({"step": done, "bits_per_byte": round(bits, 4), "lr": lr, "seconds": elapsed})
            losses.clear()
            print(f"step {done:5d}  {bits:.4f} bits per byte  lr {lr:.2e}  {elapsed:6.1f} s", flush=True)
            if not math.isfinite(bits):
                stopped.append("loss not finite")
    seconds = time.perf_counter() - begin
    return {"steps": done, "seconds": seconds, "ended_by": stopped[0] if stopped else "steps", "loss_curve": curve}


@torch.inference_mode()
def tokens_per_expert(model: Qwen3MoeForCausalLM, data: Iterator, rounds: int) -> list[list[int]]:
    """Return how many of the tokens of `rounds` training batches each expert of each layer received."""
    config = model.config
    counts = torch.zeros(config.num_hidden_layers, config.num_experts, dtype=torch.long)
    for _ in range(rounds):
        output = model(input_ids=next(data)[:, :-1], use_cache=False, output_router_logits=True)
        for row, logits in zip(counts, output.router_logits, strict=True):
            ids = logits.topk(config.num_experts_per_tok).indices
            row += torch.bincount(ids.flatten(), minlength=config.num_experts).cpu()
    return counts.tolist()


def save(out: Path, model: Qwen3MoeForCausalLM, files: list[SourceFile], version: str | None) -> None:
    """Write the checkpoint in bfloat16, the held-out text and the list of files: seven files in all with train.json."""
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out, max_shard_size="15MB")
    (out / "generation_config.json").unlink(missing_ok=True)
    (out / "heldout.txt").write_bytes(heldout_text(files))
    (out / "files.json").write_text(json.dumps(manifest(files, version), indent=1) + "\n")


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    files = read_sources(args.stdlib, heldout_limit=args.heldout_limit)
    model, masters = build(args)
    report: dict = {
        "settings": {k: v for k, v in vars(args).items() if k not in ("out", "stdlib")},
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "versions": {"python": platform.python_version()} | {m.__name__: m.__version__ for m in (torch, transformers)},
        "stdlib": {k: v for k, v in manifest(files, args.stdlib_version).items() if k != "files"},
        "parameters": sum(p.numel() for p in model.parameters()),
    }
    print(json.dumps(report), flush=True)
    report["experts_implementation"] = choose_experts(model)
    data = random_windows(files, args.batch, args.window, args.seed, args.device)
    begin = time.perf_counter()
    step, report["mode"] = make_step(model, next(data), args.compile)
    report["setup_seconds"] = time.perf_counter() - begin
    print(f"{report['mode']} training, set up in {report['setup_seconds']:.1f} s", flush=True)
    report |= train(model, masters, data, step, args)
    save(args.out, model, files, args.stdlib_version)

    def add(**results: object) -> None:  # written after each measurement: a failure in one loses no other
        report.update(results)
        (args.out / "train.json").write_text(json.dumps(report, indent=1) + "\n")

    add()
    heldout = heldout_text(files)
    bits = bits_per_byte(model, heldout)
    print(f"held-out: {bits:.4f} bits per byte in bfloat16 over {len(heldout):,} bytes", flush=True)
    add(heldout_bits_per_byte=bits, heldout_bytes=len(heldout))
    counts = tokens_per_expert(model, data, rounds=16)
    for layer, row in enumerate(counts):
        print(f"layer {layer}: tokens per expert {row}", flush=True)
    add(routed_tokens=16 * args.batch * args.window, tokens_per_expert=counts)
    prompt = encode(b"def ")[None].to(args.device)
    written = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=200, do_sample=False)
    add(sample=ByT5Tokenizer().decode(written[0], skip_special_tokens=True))
    print(report["sample"], flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
