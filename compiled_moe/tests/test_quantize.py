"""compiled-moe quantize: what is measured, what is written, what dead experts become, and MXFP4 bit for bit."""

import json
import sys

import pytest
import torch

import compiled_moe
from compiled_moe.checkpoint import Checkpoint
from compiled_moe.export import Calibration, export
from nvfp4.format import dequantize_blocks

from .test_loader import IDS, SMALL, random_model, written

transformers = pytest.importorskip("transformers")
TEXT = "def calibrate(text):\n    return text\n"
EXPERTS = "model.layers.{}.mlp.experts"


def quantize(capsys, monkeypatch, *arguments):
    from compiled_moe import cli

    monkeypatch.setattr(sys, "argv", ["compiled-moe", "quantize", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    out = capsys.readouterr()
    assert "Traceback" not in out.err
    return end.value.code, out.out, out.err


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
    from compiled_moe.shards import Reader

    reader = Reader()
    return {key: reader.get(h).clone() for key, h in Checkpoint.open(folder).headers.items()}


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


def test_weights_are_the_nearest_of_the_format(source, tmp_path, capsys, monkeypatch):
    folder, model = source
    assert quantize(capsys, monkeypatch, folder, "--out", tmp_path / "o", "--activation", "none")[0] == 0
    got = tensors(tmp_path / "o")
    assert not [key for key in got if key.endswith("input_scale")]
    assert Checkpoint.open(tmp_path / "o").quantization.weight_only
    w = model.model.layers[1].mlp.experts.gate_up_proj[3, 32:].detach()
    prefix = f"{EXPERTS.format(1)}.3.up_proj"
    scale = got[f"{prefix}.weight_scale_2"]
    assert float(scale) == pytest.approx(float(w.abs().max()) / 2688, rel=1e-6)
    value = dequantize_blocks(got[f"{prefix}.weight"], got[f"{prefix}.weight_scale"].view(torch.uint8)) * scale
    assert float((value - w).norm() / w.norm()) < 0.12
    assert torch.equal(got["lm_head.weight"], model.lm_head.weight.bfloat16())


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


def test_shards_are_written_as_they_fill(source, tmp_path):
    _, model = source
    with Calibration(model) as calibration:
        model(IDS)
    one = export(model, calibration, tmp_path / "one")
    many = export(model, calibration, tmp_path / "many", shard_bytes=40_000)
    files = sorted(f.name for f in many.glob("*.safetensors"))
    assert len(files) > 3 and files[0].startswith("model-00001-of-") and not list(many.glob("*.part"))
    a, b = tensors(one), tensors(many)
    assert a.keys() == b.keys() and all(
        torch.equal(a[k].view(torch.uint8), b[k].view(torch.uint8)) for k in a if a[k].dim()
    )
    assert max((many / f).stat().st_size for f in files) < 40_000 + 384 * 64 * 2 + 4096 * 4


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
    ],
)
def test_wrong_calls_are_sentences(arguments, message, source, tmp_path, capsys, monkeypatch):
    (tmp_path / "empty").write_text("")
    arguments = [a.replace("EMPTY", str(tmp_path / "empty")) for a in arguments]
    code, _, err = quantize(capsys, monkeypatch, source[0], "--out", tmp_path / "x", *arguments)
    assert code == 2 and message in err and not list((tmp_path / "x").glob("*"))


def test_a_full_folder_a_quantised_source_and_nan_weights_are_refused(source, tmp_path, capsys, monkeypatch):
    folder, model = source
    code, _, err = quantize(capsys, monkeypatch, folder, "--out", folder, "--activation", "none")
    assert code == 2 and "give an empty folder" in err
    code, _, err = quantize(capsys, monkeypatch, compiled_moe.DEMO, "--out", tmp_path / "x")
    assert code == 2 and "is NVFP4 already" in err
    with torch.no_grad():
        model.model.layers[0].mlp.experts.down_proj[2, 0, 0] = float("nan")
    with pytest.raises(compiled_moe.CheckpointError, match=r"experts\.2\.down_proj holds NaN"):
        export(model, Calibration(model), tmp_path / "y", "none")
    assert not (tmp_path / "y" / "config.json").exists()
    _, oss = written("gpt_oss", tmp_path / "mx")
    with pytest.raises(compiled_moe.CheckpointError, match="transposed or have biases"):
        Calibration(random_model(transformers.AutoConfig.from_pretrained(oss)))
