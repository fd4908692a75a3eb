"""NVFP4 as other packages write and read it: compressed-tensors and NVIDIA ModelOpt against this one.

ModelOpt is too heavy for every run: its export of a tiny model lies in data/modelopt, made by bench/peer_checkpoint.py
with nvidia-modelopt 0.47, and is made again and compared where that package is installed.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import compiled_moe
import nvfp4
from bench import peer_checkpoint
from compiled_moe.calibration import Calibration
from compiled_moe.checkpoint import Checkpoint
from compiled_moe.export import Plan
from compiled_moe.writing import ShardWriter
from nvfp4.format import decode_e4m3, unpack

from . import checkpoints as c
from .test_formats import finalized, raw_of, same

DATA = Path(__file__).parent / "data" / "modelopt"
PREFIX = "model.layers.0.mlp.experts"
ULP = 2.0**-23


@pytest.fixture
def ct():
    """compressed-tensors' own functions."""
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is missing: nothing is compared with it")
    from types import SimpleNamespace

    from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor, unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.lifecycle.forward import dequantize
    from compressed_tensors.quantization.quant_scheme import NVFP4, NVFP4A16
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    scheme = QuantizationScheme(**NVFP4, targets=["Linear"])

    def scales(w, g=None):
        """weight_global_scale (1) and weight_scale as they compute them; the global one may be given."""
        g = generate_gparam(w.min(), w.max()) if g is None else g
        blocks = w.unflatten(1, (-1, 16))
        return g, calculate_qparams(blocks.amin(-1), blocks.amax(-1), scheme.weights, global_scale=g)[0]

    def compress(w, g=None):
        g, s = scales(w, g)
        state = {"weight": w, "weight_scale": s, "weight_global_scale": g}
        return NVFP4PackedCompressor.compress(state, scheme)

    def values(state):
        """What they say the tensors stand for: in bfloat16 as they decompress, and in float32."""
        packed, scale, g = (state[k] for k in ("weight_packed", "weight_scale", "weight_global_scale"))
        q = unpack_fp4_from_uint8(packed, packed.shape[0], 2 * packed.shape[1], dtype=torch.float32)
        full = dequantize(x_q=q, scale=scale.float(), args=scheme.weights, global_scale=g, dtype=torch.float32)
        return NVFP4PackedCompressor.decompress(state, scheme)["weight"], full

    return SimpleNamespace(compress=compress, values=values, presets={"NVFP4": NVFP4, "NVFP4A16": NVFP4A16})


def weights(shape, kind, seed):
    w = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.05
    if kind == "wide":  # block maxima over 18 binades: subnormal block scales
        w *= torch.exp2(torch.arange(w.shape[1] // 16) % 19 - 18.0).repeat_interleave(16)
    if kind == "outlier":
        w[3, 5] = 40.0
    if kind == "signed zeros":
        w[::2] = -0.0
    return w


def source_model():
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(
        DATA / "source", dtype=torch.float32, experts_implementation="eager"
    ).eval()


def of(raw, e, projection):
    return (raw.slot(e, projection, t) for t in ("weight", "weight_scale", "weight_scale_2"))


@pytest.mark.parametrize("kind", ["plain", "wide", "outlier", "signed zeros"])
def test_what_compressed_tensors_packs_is_read_as_its_own_values(kind, ct, tmp_path):
    states: dict = {}
    tensors: dict = {}
    for i, (e, p) in enumerate((e, p) for e in range(c.E) for p in c.GATED):
        states[e, p] = ct.compress(weights(c.shape(p, 608, 304), kind, i))
        tensors |= {f"{PREFIX}.{e}.{p}.{key}": value for key, value in states[e, p].items()}
    quantization = config_of(ct, "NVFP4A16")
    raw = raw_of(c.write(tmp_path, tensors, quantization))
    assert nvfp4.check(raw, "w4a16").ok
    for (e, p), state in states.items():
        codes, scale, g = of(raw, e, p)
        half, full = ct.values(state)
        assert torch.equal(nvfp4.dequantize(codes, scale, g, torch.bfloat16), half)
        own = nvfp4.dequantize(codes, scale, g)
        assert float((own - full).abs().max() / full.abs().max()) < ULP
        assert torch.all((own - full).abs() <= 2 * ULP * full.abs())  # they divide the scale first: one rounding more
        assert torch.equal(
            unpack(codes) * (decode_e4m3(scale) / state["weight_global_scale"]).repeat_interleave(16, 1), full
        )
        assert torch.equal(torch.signbit(unpack(codes)), torch.signbit(full))


def test_with_a_power_of_two_both_orders_of_multiplication_are_bit_equal(ct):
    state = ct.compress(weights((64, 608), "wide", 0), torch.tensor([2.0**13]))
    half, full = ct.values(state)
    own = nvfp4.dequantize(state["weight_packed"], state["weight_scale"], 1 / state["weight_global_scale"].reshape(()))
    assert torch.equal(own, full) and torch.equal(own.bfloat16(), half) and int((own != 0).sum()) > 20_000


@pytest.mark.parametrize("kind", ["plain", "wide", "outlier"])
def test_what_we_quantise_compressed_tensors_decompresses_to_the_same_values(kind, ct):
    w = weights((64, 608), kind, 7)
    g = 1 / (2688 / w.abs().amax())
    codes, scale = nvfp4.quantize(w, g)
    state = {
        "weight_packed": codes, "weight_scale": scale.view(torch.float8_e4m3fn),
        "weight_global_scale": (1 / g).reshape(1),
    }  # fmt: skip
    half, full = ct.values(state)
    own = nvfp4.dequantize(codes, scale, g)
    assert torch.equal(nvfp4.dequantize(codes, scale, g, torch.bfloat16), half)
    assert torch.all((own - full).abs() <= 2 * ULP * full.abs())


@pytest.mark.parametrize("kind", ["plain", "wide", "outlier"])
def test_compressed_tensors_chooses_the_same_codes_but_for_ties(kind, ct):
    w = weights((256, 608), kind, 3)
    theirs = ct.compress(w)
    g = 1 / theirs["weight_global_scale"].reshape(())
    codes, scale = nvfp4.quantize(w, g)
    alive = scale != 0  # they never write a zero scale
    other = theirs["weight_scale"].view(torch.uint8)
    assert int(((scale != other) & alive).sum()) <= scale.numel() // 1000  # one rounding more, at ties of e4m3
    agree = ((scale == other) & alive).repeat_interleave(16, 1)
    step = (decode_e4m3(scale).double() * g.double()).repeat_interleave(16, 1)
    ratio = (w.double() / step).abs()
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=torch.float64)
    near = ((ratio[..., None] - ties).abs() < 4 * ULP * ties).any(-1)
    differ = (unpack(codes) != unpack(theirs["weight_packed"])) & agree
    assert int(agree.sum()) > 0.6 * w.numel() and not (differ & ~near).any()


def config_of(ct, preset):
    from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme

    scheme = QuantizationScheme(**ct.presets[preset], targets=["Linear"])
    config = QuantizationConfig(
        config_groups={"group_0": scheme}, ignore=["lm_head", "re:.*gate$"], format="nvfp4-pack-quantized",
        quantization_status="compressed",
    )  # fmt: skip
    return json.loads(config.model_dump_json())


@pytest.mark.parametrize("preset, algorithm", [("NVFP4", "NVFP4"), ("NVFP4A16", "W4A16_NVFP4")])
def test_the_configuration_that_compressed_tensors_writes_is_read(preset, algorithm, ct, tmp_path):
    q = Checkpoint.open(c.write(tmp_path, c.compressed(c.experts()), config_of(ct, preset))).quantization
    assert (q.method, q.algorithm, q.weight_only) == ("compressed-tensors", algorithm, preset == "NVFP4A16")
    assert q.ignores("model.layers.0.mlp.gate") and not q.ignores(f"{PREFIX}.0.gate_proj")


def test_their_converter_between_the_conventions_ends_in_bit_equal_buffers(ct, tmp_path):
    from compressed_tensors.entrypoints.convert.converters.modelopt_nvfp4 import ModelOptNvfp4Converter

    made = c.modelopt(c.experts())
    want = finalized(c.write(tmp_path / "modelopt", made))
    converted = ModelOptNvfp4Converter(targets=["re:.*_proj$"]).process(dict(made))
    assert len(converted) == len(made) and not converted.keys() & {k for k in made if k.endswith("scale_2")}
    converted = {k: v.reshape(1) if "global" in k else v for k, v in converted.items()}
    assert same(finalized(c.write(tmp_path / "ct", converted, config_of(ct, "NVFP4"))), want)


def test_an_export_of_modelopt_is_read_as_its_own_values():
    checkpoint = Checkpoint.open(DATA / "export")
    assert checkpoint.quantization.algorithm == "NVFP4" and len(checkpoint.dense) == 4
    raw = raw_of(DATA / "export")
    report = nvfp4.check(raw, "w4a4_static")
    assert report.ok and not [f for f in report.findings if f.kind != "saturated"]
    want = load_file(DATA / "dequantised.safetensors")
    assert len(want) == 9
    for key, value in want.items():
        e, projection = key.split(".")[-3:-1]
        codes, scale, g = of(raw, int(e), projection)
        assert torch.equal(nvfp4.dequantize(codes, scale, g, torch.bfloat16), value), key


def test_an_export_of_modelopt_loads_whole_and_computes_with_its_own_weights():
    model = source_model()
    t = load_file(DATA / "export" / "model.safetensors")
    w = {
        key.removesuffix(".weight"): nvfp4.dequantize(value, t[f"{key}_scale"], t[f"{key}_scale_2"])
        for key, value in t.items()
        if key.endswith(".weight") and f"{key}_scale_2" in t
    }
    experts = model.model.layers[0].mlp.experts
    with torch.no_grad():
        for e in range(3):
            gate, up, down = (w.pop(f"{PREFIX}.{e}.{p}") for p in c.GATED)
            experts.gate_up_proj[e] = torch.cat([gate, up])
            experts.down_proj[e] = down
        for name, value in w.items():
            model.get_submodule(name).weight.copy_(value)
        ours = compiled_moe.load(DATA / "export", device="cpu")
        a, b = (m(peer_checkpoint.token_ids()).logits.double() for m in (ours, model))
    assert len(w) == 4 and float((a - b).norm() / b.norm()) < 1e-5
    static = compiled_moe.load(DATA / "export", device="cpu", precision="w4a4_static")
    assert static.nvfp4.report.ok


def test_our_export_of_the_same_model_has_the_same_bits(tmp_path):
    model = source_model()
    with Calibration(model) as calibration, torch.no_grad():
        model(peer_checkpoint.token_ids())

    def layer_max(layer, projection):  # what ModelOpt does: the experts of a layer share their activation quantizers
        return calibration.amax(layer, projection, "layer_max")

    ours = load_file(Plan.read(DATA / "source").write(ShardWriter(tmp_path), layer_max) / "model.safetensors")
    theirs = {k: v for k, v in load_file(DATA / "export" / "model.safetensors").items() if ".experts." in k}
    assert {k for k in ours if ".experts." in k} == theirs.keys() and len(theirs) == 36
    for key, value in theirs.items():
        if key.endswith("input_scale"):  # they keep the measured maximum in bfloat16
            assert float(ours[key]) == pytest.approx(float(value), rel=2**-8), key
        else:
            assert torch.equal(ours[key].reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8)), key


def test_modelopt_still_writes_the_export_that_is_kept_here(tmp_path):
    pytest.importorskip("modelopt.torch", reason="nvidia-modelopt is missing: its export is not made again")
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    w = weights((64, 608), "plain", 0)
    packed, scale, g = NVFP4QTensor.quantize(w.clone(), 16)
    codes, block_scale = nvfp4.quantize(w, g)
    assert torch.equal(codes, packed._quantized_data) and torch.equal(block_scale, scale.view(torch.uint8))
    peer_checkpoint.main(["--out", str(tmp_path)])
    for file in ("source/model.safetensors", "export/model.safetensors", "dequantised.safetensors"):
        a, b = load_file(tmp_path / file), load_file(DATA / file)
        assert a.keys() == b.keys()
        assert all(torch.equal(a[k].reshape(-1).view(torch.uint8), b[k].reshape(-1).view(torch.uint8)) for k in a), file
