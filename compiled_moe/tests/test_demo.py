"""The main job on the shipped model: load, check, finalize, compile, generate; in Python and by the command."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

import compiled_moe
import nvfp4
from compiled_moe.decode import Decoder
from compiled_moe.unquantised import unquantised

from .command import run

transformers = pytest.importorskip("transformers")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NEW = 48


@pytest.fixture(scope="module")
def model():
    return compiled_moe.load(dtype=torch.float32)


@pytest.fixture(scope="module")
def prompt():
    tokenizer = transformers.AutoTokenizer.from_pretrained(compiled_moe.DEMO)
    return tokenizer("def ", return_tensors="pt", add_special_tokens=False).input_ids[0]


@pytest.fixture(scope="module")
def eager(model, prompt):
    return [i for chunk in Decoder(model, 128, compile=False).stream(prompt, NEW) for i in chunk]


def command(*arguments, **kwargs):
    return subprocess.run(
        [sys.executable, "-m", "compiled_moe.cli", *arguments], capture_output=True, text=True, **kwargs
    )


def test_the_report_shows_the_dead_experts(model):
    report = model.nvfp4.report
    assert report.ok and report.layers == 4 and report.experts == 64
    dead = {(f.layer, f.expert) for f in report.findings if f.kind == "uncalibrated"}
    assert dead and all(layer == "model.layers.0.mlp.experts" for layer, _ in dead)
    training = json.loads((compiled_moe.DEMO / "training.json").read_text())
    counted = training["calibration"]["tokens_per_expert"]["model.layers.0.mlp.experts"]
    assert sorted(e for _, e in dead) == [e for e, n in enumerate(counted) if n == 0]


def test_expert_memory_is_at_most_030_of_bfloat16(model):
    assert model.nvfp4.expert_bytes <= 0.30 * 2 * model.nvfp4.expert_parameters


def test_static_activation_scales_are_refused_and_repaired_on_request():
    with pytest.raises(nvfp4.ScaleError, match=r"expert.*input_scale") as error:
        compiled_moe.load(precision="w4a4_static")
    assert error.value.report.layers == 4  # the whole model is in one report
    model = compiled_moe.load(precision="w4a4_static", repairs=("fill_activation_max",))
    assert model.nvfp4.report.ok and any(f.severity == "repaired" for f in model.nvfp4.report.findings)


def test_tokens_equal_transformers_own_generate(model, prompt, eager):
    want = model.generate(prompt[None].to(DEVICE), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)
    assert eager == want[0, prompt.numel() :].tolist()


def test_it_writes_python(model):
    tokenizer = transformers.AutoTokenizer.from_pretrained(compiled_moe.DEMO)
    ids = tokenizer("import os\n\ndef ", return_tensors="pt", add_special_tokens=False).input_ids[0]
    text = "".join(tokenizer.decode(c) for c in Decoder(model, 256, compile=False).stream(ids, 120))
    assert "self" in text or "return" in text or ("(" in text and ":" in text)


@pytest.mark.slow
def test_compiled_equals_eager_token_for_token(model, prompt, eager):
    decoder = Decoder(model, 128)
    if decoder.why_eager:
        pytest.skip(decoder.why_eager)
    decoder.warmup(prompt)
    assert [i for chunk in decoder.stream(prompt, NEW) for i in chunk] == eager
    assert (decoder.graphs() > 0) == (DEVICE == "cuda")


def test_stream_stops_and_starts_again(model, prompt, eager):
    decoder = Decoder(model, 128, compile=False)
    stop = frozenset([eager[7]])
    cut = eager[: eager.index(eager[7])]
    assert [i for chunk in decoder.stream(prompt, NEW, stop) for i in chunk] == cut
    assert [i for chunk in decoder.stream(prompt, NEW) for i in chunk] == eager


def test_sampling_is_seeded(model, prompt):
    def sample(seed):
        return [i for c in Decoder(model, 64, compile=False, temperature=1.0, seed=seed).stream(prompt, 24) for i in c]

    assert sample(1) == sample(1) != sample(2)


def test_health_counts_inside_the_decode_step(prompt):
    model = compiled_moe.load(dtype=torch.float32)
    rows = compiled_moe.enable_health(model)
    for _ in Decoder(model, 64, compile=False).stream(prompt, 8):
        pass
    for row in rows:
        got = nvfp4.health.read(row)
        assert got["rows"] == prompt.numel() + 7 and got["nonfinite_in"] == got["nonfinite_out"] == 0
        assert sum(got["tokens"]) == 4 * got["rows"]


@pytest.mark.parametrize("precision", ["w4a16", "w4a4_per_token"])
def test_logits_are_close_to_the_dequantised_model(precision, prompt):
    ours = compiled_moe.load(dtype=torch.float32, precision=precision, device=DEVICE)
    theirs = unquantised(compiled_moe.load(dtype=torch.float32, device=DEVICE))
    text = (compiled_moe.DEMO / "heldout.txt").read_bytes()[:256]
    ids = torch.tensor([[b + 3 for b in text]], device=DEVICE)
    a, b = ours(ids).logits.double(), theirs(ids).logits.double()
    relative = float((a - b).norm() / b.norm())
    assert relative < (1e-4 if precision == "w4a16" else 0.25), relative
    assert precision == "w4a16" or relative > 1e-3  # W4A4 really quantises activations


def test_generate_command(tmp_path):
    done = command("generate", "--no-compile", "--max-new-tokens", "12", "--json", "--health")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (
        summary["schema"] == 1 and summary["tokens"] == 12 and summary["scales"]["ok"] and len(summary["health"]) == 4
    )
    assert done.stderr.startswith("def ") and summary["text"] in done.stderr
    human = command("generate", "--no-compile", "--max-new-tokens", "12")
    assert human.stdout.strip().startswith("def " + summary["text"][:8]) and "tokens/s" in human.stderr


def broken_copy(tmp_path, change):
    folder = tmp_path / "model"
    shutil.copytree(compiled_moe.DEMO, folder)
    change(folder)
    return str(folder)


def rewrite(change):
    def apply(folder):
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return apply


EXPERT = "model.layers.2.mlp.experts.5.up_proj"


def pop(key):
    return lambda t: t.pop(key)


def put(key, value):
    return lambda t: t.__setitem__(key, value)


def edit_config(**changes):
    def apply(folder):
        config = json.loads((folder / "config.json").read_text())
        config.update(changes)
        (folder / "config.json").write_text(json.dumps(config))

    return apply


FAULTS = {
    "missing scale": (rewrite(pop(f"{EXPERT}.weight_scale_2")), 1, "2.mlp.experts, expert 5: up_proj.weight_scale_2"),
    "nan scale": (rewrite(put(f"{EXPERT}.weight_scale_2", torch.tensor(float("nan")))), 1, "not_finite"),
    "reciprocal": (rewrite(put(f"{EXPERT}.weight_scale_2", torch.tensor(8000.0))), 1, "encode factor"),
    "no place": (rewrite(put("model.extra.weight", torch.zeros(2))), 2, "model.safetensors:model.extra.weight"),
    "no norm": (rewrite(pop("model.norm.weight")), 2, "model.norm.weight"),
    "wrong shape": (rewrite(put(f"{EXPERT}.weight", torch.zeros(2).byte())), 2, "experts.5.up_proj.weight is U8 (2,)"),
    "converted": (rewrite(put(f"{EXPERT}.weight_scale", torch.ones(256, 16))), 2, "never converted"),
    "fp8": (edit_config(quantization_config={"quant_method": "fp8"}), 2, "quant_method 'fp8'"),
    "not quantised": (edit_config(quantization_config=None), 2, "not quantised"),
    "unknown model": (edit_config(model_type="nonesuch"), 2, "nonesuch"),
    "no config": (lambda folder: (folder / "config.json").unlink(), 2, "config.json is missing"),
    "bad json": (lambda folder: (folder / "config.json").write_text("{"), 2, "cannot be read as JSON"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), 2, r"no *.safetensors"),
    "truncated": (lambda f: (f / "model.safetensors").write_bytes(b"1" * 64), 2, "cannot be read as safetensors"),
    "outside": (
        lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../x.safetensors"}}'),
        2,
        "outside its own folder",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_checkpoint_is_a_sentence_with_the_right_exit_code(tmp_path, fault, capsys, monkeypatch):
    change, code, message = FAULTS[fault]
    got, _, err = run(capsys, monkeypatch, "generate", broken_copy(tmp_path, change), "--no-compile")
    assert got == code and message in err


@pytest.mark.parametrize(
    "arguments, code, message",
    [
        (["/nope"], 2, "/nope does not exist"),
        ([__file__], 2, "is a file"),
        (["--precision", "fp8"], 2, "known are w4a16"),
        (["--dtype", "int8"], 2, "known are bfloat16"),
        (["--prompt", ""], 2, "prompt is empty"),
        (["--max-new-tokens", "4000"], 2, "2048 positions"),
        (["--repair", "clamp"], 2, "known are fill_activation_max"),
        (["--precision", "w4a4_static"], 1, "fill_activation_max"),
        (["--bogus"], 2, "--bogus"),
        (["--device", "tpu"], 2, "device is 'tpu'; give cuda or cpu"),
        pytest.param(
            ["--device", "cuda"], 3, "no CUDA device", marks=pytest.mark.skipif(DEVICE == "cuda", reason="has one")
        ),
    ],
)
def test_a_wrong_call_is_a_sentence_with_the_right_exit_code(arguments, code, message, capsys, monkeypatch):
    got, _, err = run(capsys, monkeypatch, "generate", *arguments, "--no-compile")
    assert got == code and message in err


def test_a_missing_extra_is_named(tmp_path):
    code = (
        "import sys; sys.modules['transformers'] = None; from compiled_moe.cli import main; "
        "sys.argv = ['compiled-moe', 'generate']; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 3 and "pip install 'compiled-moe[hf]'" in done.stderr and "Traceback" not in done.stderr


def test_without_a_compiler_it_says_so_and_runs(tmp_path):
    done = command(
        "generate", "--max-new-tokens", "4", "--json", "--device", "cpu",
        env={"PATH": str(tmp_path), "HOME": str(tmp_path), "PYTHONPATH": ":".join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["backend"] == "cpu torch" and "no C++ compiler" in summary["why_eager"] and not summary["compiled"]
