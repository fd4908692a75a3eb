"""compiled-moe inspect: every scale, from the header and the scale tensors alone, in four forms."""

import json
import math
import struct
import sys
from html.parser import HTMLParser

import pytest
import torch

import compiled_moe
from compiled_moe.checkpoint import Checkpoint
from compiled_moe.inspection import table
from compiled_moe.survey import survey

from . import checkpoints as c
from .command import run

X = "model.layers.0.mlp.experts"


def inspect(capsys, monkeypatch, *arguments):
    return run(capsys, monkeypatch, "inspect", *arguments)


@pytest.fixture
def healthy(tmp_path):
    return c.write(tmp_path / "healthy", c.modelopt(c.experts()))


def broken(folder, **changes):
    tensors = c.modelopt(c.experts())
    for key, value in changes.items():
        tensors[f"{X}.{key.replace('/', '.')}"] = value
    return c.write(folder / "broken", tensors)


def test_a_healthy_checkpoint_is_measured_and_exits_0(healthy, capsys, monkeypatch):
    code, out, err = inspect(capsys, monkeypatch, healthy)
    assert code == 0 and not err  # no progress where stderr is no terminal
    assert f"{c.H} x {c.I}" in out and "usable as: w4a16 yes, w4a4_per_token yes, w4a4_static yes" in out
    code, out, err = inspect(capsys, monkeypatch, healthy, "--json")
    data = json.loads(out)
    made = c.experts()
    scales = [float(t["weight_scale_2"]) for t in made.values()]
    (layer,) = data["layers"]
    assert code == 0 and data["schema"] == 1 and layer["weight_scale_2"] == [min(scales), max(scales)]
    stored = torch.cat([t["weight_scale"].view(torch.uint8).flatten() for t in made.values()])
    assert data["block_scale_histogram"] == torch.bincount(stored, minlength=128).tolist()
    assert layer["block_scale"]["total"] == stored.numel() == sum(data["block_scale_histogram"])
    ratio = max(abs(math.log(float(made[e, "gate_proj"]["weight_scale_2"] / made[e, "up_proj"]["weight_scale_2"])))
                for e in range(c.E))  # fmt: skip
    assert layer["gate_up_ratio"] == pytest.approx(math.exp(ratio), rel=1e-6)
    assert layer["bytes"] == sum(v.numel() * v.element_size() for v in c.modelopt(made).values())


def test_findings_exit_1_and_are_in_every_form(tmp_path, capsys, monkeypatch):
    folder = broken(tmp_path, **{"1/up_proj/input_scale": torch.tensor(0.0)})
    page = tmp_path / "page.html"
    code, out, err = inspect(capsys, monkeypatch, folder, "--json", "--html", page)
    data = json.loads(out)
    assert code == 1 and data["usable"] == {"w4a16": True, "w4a4_per_token": True, "w4a4_static": False}
    (finding,) = [f for f in data["report"]["findings"] if f["severity"] == "error"]
    assert (finding["layer"], finding["expert"], finding["kind"]) == (X, 1, "zero")
    assert "expert 1: up_proj.input_scale = 0 [zero]" in err and "zero" in page.read_text()
    code, out, _ = inspect(capsys, monkeypatch, folder, "--precision", "w4a16")
    assert code == 0 and "note" in out and "w4a4_static not looked at" in out


def test_weights_are_never_read(tmp_path, monkeypatch):
    """Any read of codes would be of a tensor that this reader refuses."""
    from compiled_moe import shards

    folder = c.write(tmp_path, c.modelopt(c.experts()), shards=2)
    read = []
    get = shards.Reader.get

    def watch(self, header):
        read.append(header.key)
        return get(self, header)

    monkeypatch.setattr(shards.Reader, "get", watch)
    assert survey(Checkpoint.open(folder)).report.ok
    assert len(read) == 9 * 3 and not [key for key in read if key.endswith(".weight")]
    read.clear()
    found = survey(Checkpoint.open(folder), codes=True)
    want = torch.zeros(16, dtype=torch.int64)
    for t in c.experts().values():
        for nibble in (t["weight"] & 15, t["weight"] >> 4):
            want += torch.bincount(nibble.flatten(), minlength=16)
    assert found.codes is not None and found.codes.tolist() == want.tolist()


def test_a_zero_scale_is_settled_by_the_codes_of_that_expert(tmp_path):
    zero = {"1/up_proj/weight_scale_2": torch.tensor(0.0)}
    assert [f.kind for f in survey(Checkpoint.open(broken(tmp_path / "a", **zero))).report.errors] == ["zero"]
    zero["1/up_proj/weight"] = torch.full((c.I, c.H // 2), 0x80, dtype=torch.uint8)
    report = survey(Checkpoint.open(broken(tmp_path / "b", **zero))).report
    assert report.ok and "zero_expert" in {f.kind for f in report.findings}


@pytest.mark.parametrize("family", ["compressed", "fused", "gpt_oss", "deepseek", "no gate"])
def test_every_format(family, tmp_path):
    made = c.experts()
    tensors, quantization = {
        "compressed": lambda: (c.compressed(made), c.COMPRESSED),
        "fused": lambda: (c.fused(made), c.MODELOPT),
        "gpt_oss": lambda: (c.gpt_oss(c.mx_experts()), {"quant_method": "mxfp4"}),
        "deepseek": lambda: (c.deepseek(c.mx_experts()), {"quant_method": "fp8"}),
        "no gate": lambda: (c.modelopt(c.experts(("up_proj", "down_proj")), "layers.1.mixer.experts"), c.MODELOPT),
    }[family]()
    found = survey(Checkpoint.open(c.write(tmp_path, tensors, quantization, expert_dtype="fp4")))
    assert found.report.ok and found.report.experts == c.E
    assert (found.precision == "w4a16") == (family in ("gpt_oss", "deepseek"))
    assert (found.layers[0].gate_up_ratio is None) == (family == "no gate")


def test_dense_layers_are_checked_too(tmp_path):
    tensors = c.modelopt(c.experts())
    for key, value in c.experts(("gate_proj",), count=1)[0, "gate_proj"].items():
        tensors[f"model.layers.0.self_attn.q_proj.{key}"] = value
    found = survey(Checkpoint.open(c.write(tmp_path / "a", tensors)))
    assert found.report.ok and found.dense == ["model.layers.0.self_attn.q_proj"] and found.report.dense == 1
    tensors["model.layers.0.self_attn.q_proj.weight_scale_2"] = torch.tensor(3000.0)
    (finding,) = survey(Checkpoint.open(c.write(tmp_path / "b", tensors))).report.errors
    assert (finding.layer, finding.expert, finding.kind) == ("model.layers.0.self_attn.q_proj", None, "convention")


class Page(HTMLParser):
    """Every reference to something outside the file, and every tag."""

    def __init__(self):
        super().__init__()
        self.outside, self.tags = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.outside += [v for k, v in attrs if k in ("src", "href") and not v.startswith("data:")]


def test_the_page_stands_alone_escapes_names_and_knows_dark(tmp_path, capsys, monkeypatch):
    pytest.importorskip("jinja2", reason="comes with the report extra")
    made = c.modelopt(c.experts(), "model.<script>alert(1)</script>.mlp.experts")
    folder = c.write(
        tmp_path / "x", made | {"model.<script>alert(1)</script>.mlp.experts.0.up_proj.input_scale": torch.tensor(-1.0)}
    )
    assert inspect(capsys, monkeypatch, folder, "--html", tmp_path / "p.html")[0] == 1
    text = (tmp_path / "p.html").read_text()
    page = Page()
    page.feed(text)
    assert not page.outside and "script" not in page.tags and "&lt;script&gt;" in text
    assert "color-scheme: light dark" in text and page.tags.count("rect") == 127 and page.tags.count("img") == 3


@pytest.mark.parametrize("kind, magic", [("png", b"\x89PNG"), ("pdf", b"%PDF")])
def test_plots(kind, magic, healthy, tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib", reason="comes with the report extra")
    path = tmp_path / f"scales.{kind}"
    assert inspect(capsys, monkeypatch, healthy, "--plot", path, "--codes")[0] == 0
    assert path.read_bytes().startswith(magic)


@pytest.mark.parametrize(
    "arguments, code, message",
    [
        (["/nope"], 2, "/nope does not exist"),
        (["HEALTHY", "--precision", "fp8"], 2, "known are w4a16"),
        (["HEALTHY", "--plot", "x.gif"], 2, "must end in .png"),
        (["HEALTHY", "--html", "/nope/x.html"], 2, "cannot be written"),
    ],
)
def test_wrong_calls_are_sentences(arguments, code, message, healthy, capsys, monkeypatch):
    got, _, err = inspect(capsys, monkeypatch, *(a.replace("HEALTHY", str(healthy)) for a in arguments))
    assert got == code and message in err


def test_missing_extras_are_named(healthy, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    code, _, err = inspect(capsys, monkeypatch, healthy, "--html", tmp_path / "x.html")
    assert code == 3 and "pip install 'compiled-moe[report]'" in err


def test_the_shipped_model_shows_its_uncalibrated_experts(capsys, monkeypatch):
    code, out, _ = inspect(capsys, monkeypatch, compiled_moe.DEMO)
    assert code == 1 and "model.layers.0.mlp.experts, experts 1, 2, 5" in out and "w4a16 yes" in out
    found = survey(Checkpoint.open(compiled_moe.DEMO), "w4a16")
    assert found.report.ok and table(found).row_count == 4


def test_terminal_control_characters_in_a_key_are_refused(tmp_path):
    folder = c.write(tmp_path, c.modelopt(c.experts()))
    header = json.dumps({"\x1b[2Jx": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0")
    with pytest.raises(compiled_moe.CheckpointError, match="cannot be printed safely"):
        Checkpoint.open(folder)


@pytest.mark.slow
def test_the_key_space_of_a_235b_model_takes_seconds(tmp_path):
    import time

    from bench import synthetic_checkpoint

    assert synthetic_checkpoint.main([str(tmp_path), "--hidden", "64", "--broken"]) == 0
    begin = time.perf_counter()
    found = survey(Checkpoint.open(tmp_path))
    seconds = time.perf_counter() - begin
    errors = {(int(f.layer.split(".")[2]), f.expert, f.projection, f.kind) for f in found.report.errors}
    assert errors == {
        (3, 5, "up_proj", "zero"), (5, 9, "down_proj", "missing"), (7, 2, "gate_proj", "nan_block"),
        (11, 0, "gate_proj", "convention"),
    }  # fmt: skip
    assert len(found.checkpoint.headers) == 94 * 128 * 3 * 4 - 1 and seconds < 60
