"""compiled-moe quantize: what is measured, what is written, what dead experts become, and MXFP4 bit for bit."""

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

import compiled_moe
from compiled_moe.calibration import Calibration
from compiled_moe.checkpoint import Checkpoint
from compiled_moe.export import Plan
from compiled_moe.shards import Reader, read_headers
from compiled_moe.writing import ShardWriter
from nvfp4.format import dequantize_blocks

from . import checkpoints as c
from .command import run
from .test_loader import IDS, SMALL, random_model, written

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
TEXT = "def calibrate(text):\n    return text\n"
EXPERTS = "model.layers.{}.mlp.experts"


def quantize(capsys, monkeypatch, *arguments):
    return run(capsys, monkeypatch, "quantize", *arguments)


@pytest.fixture
def source(tmp_path):
    """A small model in bfloat16 values, with a byte tokenizer; eight experts, so that short text misses some."""
    small = {k: v for k, v in SMALL.items() if k not in ("num_local_experts", "vocab_size", "num_experts_per_tok")}
    config = transformers.Qwen3MoeConfig(
        **small, moe_intermediate_size=32, num_experts=8, num_experts_per_tok=2, decoder_sparse_step=1, vocab_size=384
    )
    model = random_model(config)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.bfloat16())
    model.save_pretrained(tmp_path / "source")
    transformers.ByT5Tokenizer().save_pretrained(tmp_path / "source")
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "source", model


def tensors(folder):
    reader = Reader()
    return {key: reader.get(h).clone() for key, h in read_headers(folder).items()}


def seen(model, ids):
    """The oracle: largest input of each (layer, expert) by a hook of its own, token by token."""
    found: dict[tuple[int, int], float] = {}

    def watch(layer):
        def hook(module, args):
            x, chosen, _ = args
            for row, experts in zip(x, chosen.tolist(), strict=True):
                for e in experts:
                    found[layer, e] = max(found.get((layer, e), 0.0), float(row.abs().max()))

        return hook

    handles = [m.mlp.experts.register_forward_pre_hook(watch(i)) for i, m in enumerate(model.model.layers)]
    with torch.no_grad():
        for window in ids:
            model(window[None], use_cache=False)
    for handle in handles:
        handle.remove()
    return found


def test_scales_are_measured_and_dead_experts_carry_none(source, tmp_path, capsys, monkeypatch):
    folder, model = source
    out = tmp_path / "out"
    arguments = (folder, "--out", out, "--calibrate", tmp_path / "text.txt", "--tokens", 5, "--window", 3, "--json")
    code, text, err = quantize(capsys, monkeypatch, *arguments)
    summary = json.loads(text)
    assert code == 0 and summary["schema"] == 1 and summary["calibration_tokens"] == 5 and summary["usable"]["w4a16"]
    ids = torch.tensor([b + 3 for b in TEXT.encode()[:5]])
    want = seen(transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation="eager"), ids.split(3))  # fmt: skip
    got = tensors(out)
    dead = {f: ids for f, ids in summary["dead_experts"].items()}
    assert dead
    for layer in range(2):
        name = EXPERTS.format(layer)
        assert dead.get(name, []) == [e for e in range(8) if (layer, e) not in want]
        for e in range(8):
            keys = [f"{name}.{e}.{p}_proj.input_scale" for p in ("gate", "up", "down")]
            assert all((key in got) == ((layer, e) in want) for key in keys)
            if (layer, e) in want:
                assert float(got[keys[0]]) == pytest.approx(want[layer, e] / 2688, rel=1e-6)
                assert torch.equal(got[keys[0]], got[keys[1]]) and float(got[keys[2]]) > 0
    assert "saw no calibration token and carry no input_scale" in err
    loaded = compiled_moe.load(out, device="cpu")  # w4a16
    with torch.no_grad():
        a, b = loaded(IDS).logits.flatten().double(), model(IDS).logits.flatten().double()
    assert float(torch.cosine_similarity(a, b, 0)) > 0.97
    q = json.loads((out / "config.json").read_text())["quantization_config"]
    assert "model.layers.*.self_attn.q_proj" in q["ignore"] and "lm_head" in q["ignore"]
    assert (out / "tokenizer_config.json").exists()


def test_weights_are_the_nearest_of_the_format_and_gate_and_up_share_a_scale(source, tmp_path, capsys, monkeypatch):
    folder, model = source
    assert quantize(capsys, monkeypatch, folder, "--out", tmp_path / "o", "--activation", "none")[0] == 0
    got = tensors(tmp_path / "o")
    assert not [key for key in got if key.endswith("input_scale")]
    assert Checkpoint.open(tmp_path / "o").quantization.weight_only
    experts = model.model.layers[1].mlp.experts
    for e in range(8):
        gate, up = experts.gate_up_proj[e].detach().split(32)
        for name, w in {"gate": gate, "up": up, "down": experts.down_proj[e].detach()}.items():
            prefix = f"{EXPERTS.format(1)}.{e}.{name}_proj"
            scale = got[f"{prefix}.weight_scale_2"]
            largest = w.abs().max() if name == "down" else experts.gate_up_proj[e].detach().abs().max()
            assert float(scale) == pytest.approx(float(largest) / 2688, rel=1e-6)
            value = dequantize_blocks(got[f"{prefix}.weight"], got[f"{prefix}.weight_scale"].view(torch.uint8)) * scale
            assert float((value - w).norm() / w.norm()) < 0.12
    before = tensors(folder)
    left = {key: value for key, value in before.items() if ".experts." not in key}
    assert len(left) > 10 and all(torch.equal(got[key], value) for key, value in left.items())
    assert sum(".experts." in key for key in got) == 2 * 8 * 3 * 3


def test_layer_max_gives_every_expert_the_largest(source, tmp_path, capsys, monkeypatch):
    folder, _ = source
    text = tmp_path / "text.txt"
    code, out, _ = quantize(
        capsys,
        monkeypatch,
        folder,
        "--out",
        tmp_path / "m",
        "--calibrate",
        text,
        "--tokens",
        5,
        "--activation",
        "layer_max",
    )
    assert code == 0 and "take the layer's maximum" in out and "w4a4_static yes" in out
    quantize(capsys, monkeypatch, folder, "--out", tmp_path / "e", "--calibrate", text, "--tokens", 5)
    own, shared = tensors(tmp_path / "e"), tensors(tmp_path / "m")
    for projection in ("gate_proj", "down_proj"):
        keys = [f"{EXPERTS.format(0)}.{e}.{projection}.input_scale" for e in range(8)]
        assert len({float(shared[key]) for key in keys}) == 1
        assert float(shared[keys[0]]) == max(float(own[key]) for key in keys if key in own)


def fused(folder, out, **changes):
    """The same model with all experts of a layer in one tensor; returns the folder."""
    before = tensors(folder)
    after = {key: value for key, value in before.items() if ".experts." not in key}
    for layer in range(2):
        name = EXPERTS.format(layer)
        w = {p: torch.stack([before[f"{name}.{e}.{p}_proj.weight"] for e in range(8)]) for p in ("gate", "up", "down")}
        after |= {f"{name}.gate_up_proj": torch.cat([w["gate"], w["up"]], 1), f"{name}.down_proj": w["down"]}
    out.mkdir()
    save_file(after | changes, out / "model.safetensors")
    (out / "config.json").write_text((folder / "config.json").read_text())
    return out


def test_fused_and_separate_sources_and_any_shards_give_the_same_tensors(source, tmp_path):
    folder, _ = source
    many = Plan.read(folder).write(ShardWriter(tmp_path / "many", 40_000))
    files = sorted(f.name for f in many.glob("*.safetensors"))
    assert len(files) > 3 and files[0].startswith("model-00001-of-") and not list(many.glob("*.part"))
    assert max((many / f).stat().st_size for f in files) < 40_000 + 384 * 64 * 2 + 4096 * 4
    one = Plan.read(fused(folder, tmp_path / "fused")).write(ShardWriter(tmp_path / "one"))
    assert [f.name for f in one.glob("*.safetensors")] == ["model.safetensors"]
    scattered = tmp_path / "scattered"  # gate and up of one expert in different files
    scattered.mkdir()
    (scattered / "config.json").write_text((folder / "config.json").read_text())
    for name in ("gate_proj", "up_proj", "rest"):
        own = {k: v for k, v in tensors(folder).items() if (name if name != "rest" else "") in k}
        if name == "rest":
            own = {k: v for k, v in own.items() if "experts" not in k or "down_proj" in k}
        save_file(own, scattered / f"{name}.safetensors")
    three = Plan.read(scattered).write(ShardWriter(tmp_path / "three"))
    a = tensors(many)
    for b in (tensors(one), tensors(three)):
        assert a.keys() == b.keys() and all(torch.equal(bits(a[key]), bits(b[key])) for key in a)


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("fused", [False, True])
def test_experts_without_a_gate_and_progress_over_every_byte(fused, tmp_path):
    name, rng = "backbone.layers.0.mixer.experts", torch.Generator().manual_seed(0)
    w = {p: torch.randn(3, *c.shape(p), generator=rng).bfloat16() for p in ("up_proj", "down_proj")}
    if fused:
        made = {f"{name}.{p}": value for p, value in w.items()}
    else:
        made = {f"{name}.{e}.{p}.weight": value[e].clone() for p, value in w.items() for e in range(3)}
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "config.json").write_text('{"model_type": "nemotron_h"}')
    save_file(made, tmp_path / "in" / "model.safetensors")
    seen: list[tuple[int, int]] = []
    out = Plan.read(tmp_path / "in").write(ShardWriter(tmp_path / "out"), progress=lambda *at: seen.append(at))
    total = sum(t.nbytes for t in made.values())
    assert [t for _, t in seen] == [total] * len(made) and seen[-1][0] == total and seen[0][0] == total // len(made)
    (layer,) = Checkpoint.open(out).layers
    assert layer.spec.activation == "relu2" and layer.spec.num_experts == 3
    got = tensors(out)
    for p, value in w.items():
        for e in range(3):
            t = {k: got[f"{name}.{e}.{p}.{k}"] for k in ("weight", "weight_scale", "weight_scale_2")}
            assert float(t["weight_scale_2"]) == pytest.approx(float(value[e].abs().max()) / 2688, rel=1e-6)
            back = dequantize_blocks(t["weight"], t["weight_scale"].view(torch.uint8)) * t["weight_scale_2"]
            assert float((back - value[e]).norm() / value[e].float().norm()) < 0.12


def test_mixtral_keeps_its_names_and_is_calibrated_through_transformers_renaming(tmp_path, capsys, monkeypatch):
    model = random_model(transformers.MixtralConfig(**SMALL | {"vocab_size": 384}))
    model.save_pretrained(tmp_path / "m")
    vocabulary = {c: i for i, c in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path / "m")
    (tmp_path / "text").write_text(TEXT)
    code, _, err = quantize(
        capsys, monkeypatch, tmp_path / "m", "--out", tmp_path / "o", "--calibrate", tmp_path / "text",
        "--activation", "layer_max",
    )  # fmt: skip
    assert code == 0, err
    keys = tensors(tmp_path / "o")
    assert {k.rpartition(".")[2] for k in keys if "block_sparse_moe.experts.3.w2" in k} == {
        "weight", "weight_scale", "weight_scale_2", "input_scale",
    }  # fmt: skip
    loaded = compiled_moe.load(tmp_path / "o", device="cpu", precision="w4a4_static")
    with torch.no_grad():
        a, b = loaded(IDS).logits.flatten().double(), model(IDS).logits.flatten().double()
    assert float(torch.cosine_similarity(a, b, 0)) > 0.95


PEAK = """
import sys, torch, resource
from pathlib import Path
from compiled_moe.export import Plan
from compiled_moe.writing import ShardWriter
def kib(name):
    return int(next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith(name)).split()[1])
Plan.read(Path(sys.argv[1])).write(ShardWriter(Path(sys.argv[2]), 2**20))  # everything is loaded before we count
Path("/proc/self/clear_refs").write_text("5")
before = kib("VmRSS")
Plan.read(Path(sys.argv[3])).write(ShardWriter(Path(sys.argv[4]), 8 * 2**20))
print(kib("VmHWM") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_a_shard_and_an_expert_whatever_the_model_is(tmp_path):
    """A model of 75 MB in four files: one of 19 MB is mapped, 8 MiB wait to be written, an expert has 3 MB."""

    def model(folder, files, experts):
        folder.mkdir()
        (folder / "config.json").write_text('{"model_type": "qwen3_moe"}')
        for i in range(files):
            w = {
                f"{EXPERTS.format(i)}.{e}.{p}_proj.weight": torch.full((512, 512), 0.5, dtype=torch.bfloat16)
                for e in range(experts)
                for p in ("gate", "up", "down")
            }
            save_file(w, folder / f"{i}.safetensors")
        return folder

    small, large = model(tmp_path / "s", 1, 2), model(tmp_path / "l", 4, 12)
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", PEAK, small, tmp_path / "so", large, tmp_path / "lo"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    shard, expert = 12 * 3 * 512 * 512 * 2, 3 * 512 * 512 * 4
    assert int(done.stdout) * 1024 < shard + 8 * 2**20 + 4 * expert < 0.6 * 4 * shard, (done.stdout, shard, expert)


def test_mxfp4_becomes_nvfp4_bit_for_bit(tmp_path, capsys, monkeypatch):
    _, folder = written("gpt_oss", tmp_path / "mx")
    code, out, _ = quantize(capsys, monkeypatch, folder, "--out", tmp_path / "nv")
    assert code == 0 and "converted bit for bit" in out
    assert Checkpoint.open(tmp_path / "nv").quantization.algorithm == "W4A16_NVFP4"
    a, b = (compiled_moe.load(f, device="cpu", dtype=torch.float32) for f in (folder, tmp_path / "nv"))
    for name, weights in a.nvfp4.weights.items():
        other = b.nvfp4.weights[name].tensors
        assert all(torch.equal(t, other[key]) for key, t in weights.tensors.items())
    with torch.no_grad():
        assert torch.equal(a(IDS).logits, b(IDS).logits)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "give text with --calibrate"),
        (["--activation", "clamp"], "known are per_expert, layer_max, none"),
        (["--calibrate", "EMPTY"], "is empty"),
        (["--calibrate", "/nope.txt"], "cannot be read"),
        (["--calibrate", "EMPTY", "--activation", "none"], "measures nothing"),
        (["--activation", "none", "--device", "tpu"], "give cuda or cpu"),
    ],
)
def test_wrong_calls_are_sentences(arguments, message, source, tmp_path, capsys, monkeypatch):
    (tmp_path / "empty").write_text("")
    arguments = [a.replace("EMPTY", str(tmp_path / "empty")) for a in arguments]
    code, _, err = quantize(capsys, monkeypatch, source[0], "--out", tmp_path / "x", *arguments)
    assert code == 2 and message in err and not list((tmp_path / "x").glob("*"))


def deepseek_like(folder):
    """Experts in MXFP4 beside attention in FP8."""
    q = {"layers.0.attn.q_proj.weight": torch.ones(16, 16).to(torch.float8_e4m3fn)}
    return c.write(folder, c.deepseek(c.mx_experts()) | q, {"quant_method": "fp8"}, expert_dtype="fp4")


def test_a_full_folder_a_quantised_source_and_a_full_disk_are_sentences(source, tmp_path, capsys, monkeypatch):
    folder, _ = source
    code, _, err = quantize(capsys, monkeypatch, folder, "--out", folder, "--activation", "none")
    assert code == 2 and "give an empty folder" in err
    code, _, err = quantize(capsys, monkeypatch, compiled_moe.DEMO, "--out", tmp_path / "x")
    assert code == 2 and "is NVFP4 already" in err
    code, _, err = quantize(capsys, monkeypatch, deepseek_like(tmp_path / "ds"), "--out", tmp_path / "x")
    assert code == 2 and "q_proj.weight is F8_E4M3; only checkpoints whose other tensors" in err
    code, _, err = quantize(capsys, monkeypatch, tmp_path / "nowhere", "--out", tmp_path / "x")
    assert code == 2 and "config.json is missing" in err
    _, oss = written("gpt_oss", tmp_path / "mx")
    code, _, err = quantize(capsys, monkeypatch, oss, "--out", tmp_path / "x", "--activation", "layer_max")
    assert code == 2 and "bit for bit into a weight-only checkpoint" in err

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("compiled_moe.writing.save_file", full)
    code, _, err = quantize(capsys, monkeypatch, folder, "--out", tmp_path / "y", "--activation", "none")
    assert code == 2 and "No space left" in err and "make room" in err


N, D = EXPERTS.format(0), "down_proj"
BAD = {
    "nan": ({f"{N}.{D}": torch.full((8, 64, 32), torch.nan)}, r"down_proj: .*experts\.0\.down_proj holds NaN"),
    "bias": ({f"{N}.gate_up_proj_bias": torch.ones(8, 64)}, "gate_up_proj_bias is a bias"),
    "transposed": ({f"{N}.{D}": torch.ones(8, 32, 64)}, r"\(8, 64, 64\) into .* not transposed"),
    "quantised": ({f"{N}.{D}_weight_scale_2": torch.ones(())}, "is part of quantised weights"),
    "int": ({f"{N}.{D}": torch.ones(8, 64, 32).byte()}, "is U8; need weights in BF16, F16, F32"),
    "size": ({f"{N}.{D}": torch.ones(8, 64, 24)}, r"\(8, 64, 24\); the last size must be a positive multiple of 16"),
    "no up": (
        {f"model.layers.1.mlp.experts.{e}.gate_proj.weight": torch.ones(32, 64) for e in (0,)},
        "no up_proj is in",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_weights_that_cannot_be_quantised_are_refused_naming_the_key(name, source, tmp_path):
    changes, message = BAD[name]
    folder = fused(source[0], tmp_path / "f")
    if name == "no up":
        (folder / "model.safetensors").unlink()
        changes["x.experts.0.down_proj.weight"] = torch.ones(64, 32)
    before = load_file(folder / "model.safetensors") if name != "no up" else {}
    save_file(before | changes, folder / "model.safetensors")
    with pytest.raises(compiled_moe.CheckpointError, match=message):
        Plan.read(folder).write(ShardWriter(tmp_path / "out"))
    assert not (tmp_path / "out" / "config.json").exists()


def test_models_that_cannot_be_calibrated_are_refused(source, tmp_path):
    _, oss = written("gpt_oss", tmp_path / "mx")
    with pytest.raises(compiled_moe.CheckpointError, match="transposed or have biases"):
        Calibration(random_model(transformers.AutoConfig.from_pretrained(oss)))
    with pytest.raises(compiled_moe.CheckpointError, match="has no experts modules"):
        Calibration(torch.nn.Linear(2, 2))
    _, model = source
    with torch.no_grad():
        model.model.layers[1].post_attention_layernorm.weight[3] = torch.inf
    with (
        pytest.raises(compiled_moe.CheckpointError, match=r"layers\.1\.mlp\.experts, expert \d: an input is (inf|nan)"),
        Calibration(model),
    ):
        model(IDS)
