"""Our plug-in and our guard inside vLLM's real code: its loader, its methods, its reload; no engine, no GPU."""

import contextlib
import json
import shutil
from types import SimpleNamespace

import pytest
import torch

import compiled_moe
import nvfp4

pytest.importorskip("vllm", reason="vLLM is not installed: `make test-engines` installs it and runs this for real")

from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.fused_moe.oracle import nvfp4 as oracle
from vllm.model_executor.layers.quantization import modelopt
from vllm.model_executor.model_loader.reload.inplace import reload_weights

from compiled_moe.engines import vllm as plugin
from compiled_moe.engines.vllm import guard
from compiled_moe.engines.vllm.config import W4A16

from . import checkpoints as c
from . import test_loader as loader
from . import test_transformers as families
from . import vllm_models as v

BACKENDS = list(oracle.NvFp4MoeBackend)
INVERTING = [b for b in BACKENDS if b.value not in ("MARLIN", "HUMMING")]
IGNORED = ["lm_head", "*attn*", "*gate", "*shared_expert*", "*layers.0.mlp.gate_proj", "*layers.0.mlp.up_proj",
           "*layers.0.mlp.down_proj"]  # fmt: skip
ELSEWHERE = (ModuleNotFoundError, AssertionError, AttributeError)
"""What some backends raise after the guard, where flashinfer, humming or a GPU is missing."""
X, IDS = torch.randn(9, 64, generator=torch.Generator().manual_seed(1)), torch.tensor([[0, 1], [3, 2], [1, 3]] * 3)
WEIGHTS = torch.rand(9, 2, generator=torch.Generator().manual_seed(2))
LAYER = "model.layers.0.mlp.experts"


@pytest.fixture(scope="module", autouse=True)
def plugged():
    plugin.register()
    plugin.register()  # vLLM may call it again


def written(name, folder, **changes):
    theirs, folder = families.written(name, folder, **changes)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": [type(theirs).__name__], "topk_method": "noaux_tc"}
    if config["quantization_config"]["quant_method"] == "modelopt":
        config["quantization_config"]["ignore"] = IGNORED
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def dense(folder, **changes):
    """test_loader's NVFP4 attention and lm_head, with the prefix that vLLM wants."""
    model, tensors, said = loader.dense_qwen()
    said["config_groups"]["group_0"]["targets"] = ["Linear"]
    tensors = {k if k.startswith("lm_head") else f"model.{k}": t for k, t in tensors.items()} | changes
    config = json.loads(model.config.to_json_string()) | {"architectures": [type(model).__name__], "dtype": "float32"}
    config.pop("experts_implementation", None)
    return c.write(folder, {k: t for k, t in tensors.items() if t is not None}, said, **config)


def run(layer, x=X):
    return layer.quant_method.apply(layer, x, WEIGHTS, IDS.int(), None, None)


# The first story: what vLLM folds.


def folded(backend, dead):
    a13 = torch.tensor([0.5, 1.0, 2.0, 4.0]).repeat(2)
    a2 = a13.flip(0).clone()
    if dead:
        a13[[0, 3]], a2[[2, 7]] = 0.0, 0.0
    block = torch.ones(8, 64, 4).to(torch.float8_e4m3fn)
    g = torch.full((8,), 1e-4)
    made = modelopt.make_nvfp4_moe_quant_config(
        backend=backend, w13_scale=block, w2_scale=block, w13_scale_2=g, w2_scale_2=g, a13_scale=a13, a2_scale=a2
    )
    return made.a1_gscale, made.a2_gscale


@pytest.mark.parametrize("backend", INVERTING, ids=lambda b: b.value)
def test_dead_activation_scales_are_inf_without_the_guard_and_named_with_it(backend):
    needs_flashinfer = backend.value == "FLASHINFER_CUTEDSL"
    if needs_flashinfer:
        with pytest.raises(ModuleNotFoundError, match="flashinfer"):
            folded(backend, dead=True)
    else:
        a1, a2 = folded(backend, dead=True)
        bad = (a1 == 0, a2 == 0) if backend.value == "EMULATION" else (a1.isinf(), a2.isinf())
        assert [b.nonzero().flatten().tolist() for b in bad] == [[0, 3], [2, 7]]
        healthy = folded(backend, dead=False)
    with v.guarded():
        with pytest.raises(nvfp4.ScaleError) as refused:
            folded(backend, dead=True)
        found = {(f.projection, f.expert) for f in refused.value.report.errors}
        assert found == {("gate_up_proj", 0), ("gate_up_proj", 3), ("down_proj", 2), ("down_proj", 7)}
        assert "experts 0, 3: gate_up_proj.input_scale = 0 [zero]" in str(refused.value)
        if not needs_flashinfer:
            assert all(torch.equal(a, b) for a, b in zip(folded(backend, dead=False), healthy, strict=True))


def test_an_expert_of_zeros_may_have_a_zero_weight_scale_there():
    """Callers outside of the two methods hand over no codes; what could be legal is left to vLLM."""
    given = (torch.tensor([1e-4, 0.0]), torch.tensor([float("nan"), 1e-4]), torch.ones(2), torch.ones(2))
    report = guard._values(oracle.NvFp4MoeBackend.VLLM_CUTLASS, False, given, None)
    assert [(f.projection, f.tensor, f.expert) for f in report.errors] == [("down_proj", "weight_scale_2", 0)]


# vLLM's own loader and methods, with and without the guard.


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    return written("qwen3_moe", tmp_path_factory.mktemp("healthy"))


def stock(folder, **kwargs):
    return v.load(v.configured(folder, dtype="bfloat16", **kwargs))


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.value)
def test_a_healthy_checkpoint_reaches_vllm_bit_for_bit(backend, healthy, monkeypatch):
    before = v.Backend(monkeypatch, backend)
    with contextlib.suppress(*ELSEWHERE):
        stock(healthy)
    with v.guarded():
        after = v.Backend(monkeypatch, backend)
        with contextlib.suppress(*ELSEWHERE):
            stock(healthy)
    assert before.seen and len(before.seen) == len(after.seen)
    for a, b in zip(before.seen, after.seen, strict=True):
        assert a.keys() == b.keys() and all(torch.equal(a[k].view(torch.uint8), b[k].view(torch.uint8)) for k in a)


FAULTS = {
    "missing": (f"{LAYER}.2.down_proj.input_scale", None, "expert 2: down_proj.input_scale .missing.*w4a4-per-token"),
    "zero": (f"{LAYER}.3.gate_proj.input_scale", torch.tensor(0.0), "expert 3: gate_proj.input_scale = 0 .zero"),
    "weight": (f"{LAYER}.1.up_proj.weight_scale_2", None, "expert 1: up_proj.weight_scale_2 .missing"),
    "block": (f"{LAYER}.0.up_proj.weight_scale", None, "expert 0: up_proj.weight_scale .missing"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.value)
def test_the_guard_refuses_what_the_backend_consumes(backend, fault, tmp_path, monkeypatch):
    key, value, message = FAULTS[fault]
    folder = written("qwen3_moe", tmp_path, **{key: value})
    v.Backend(monkeypatch, backend)
    if fault != "zero" and backend.value == "VLLM_CUTLASS":
        stock(folder)  # silently: vLLM asks no file for what it did not hold
    consumes = "input_scale" not in key or backend in INVERTING
    with v.guarded():
        if consumes:
            with pytest.raises(nvfp4.ScaleError, match=message):
                stock(folder)
        else:
            with contextlib.suppress(*ELSEWHERE):
                stock(folder)


def test_without_the_guard_the_same_fault_reaches_the_kernels_as_inf(tmp_path, monkeypatch):
    key, value, _ = FAULTS["zero"]
    v.Backend(monkeypatch, oracle.NvFp4MoeBackend.VLLM_CUTLASS)
    model = stock(written("qwen3_moe", tmp_path, **{key: value}))
    scale = v.experts(model)[f"{LAYER}.routed_experts"].quant_method.moe_quant_config.a1_gscale
    assert scale.isinf().nonzero().tolist() == [[3, 0]]


@pytest.mark.parametrize("backend", ("EMULATION", "FLASHINFER_MOE_EP_CUTEDSL"))
def test_the_shipped_model_lacks_scales_that_vllm_makes_up(backend, monkeypatch):
    """Nothing of vLLM's conversion is replaced here: these two backends convert on a CPU."""
    v.Backend(monkeypatch, oracle.NvFp4MoeBackend(backend), convert=True)
    stock(compiled_moe.DEMO)  # memory that nobody wrote, folded into every expert of the layer
    with (
        v.guarded(),
        pytest.raises(nvfp4.ScaleError, match=r"experts 1, 2, 5, 10, 13, 15: gate_proj.input_scale .miss"),
    ):
        stock(compiled_moe.DEMO)


def compressed(folder, **changes):
    """The tensors of qwen3_moe as compressed-tensors writes them, activation scales included."""
    model, tensors, _ = families.modelopt("qwen3_moe")
    renamed = {}
    for key, value in tensors.items():
        stem, _, suffix = key.rpartition(".")
        if suffix in ("weight_scale_2", "input_scale"):
            name = "weight_global_scale" if suffix == "weight_scale_2" else "input_global_scale"
            renamed[f"{stem}.{name}"] = (1 / value).reshape(1)
        else:
            renamed[f"{stem}.weight_packed" if value.dtype == torch.uint8 else key] = value
    config = json.loads(model.config.to_json_string()) | {"architectures": [type(model).__name__], "dtype": "float32"}
    config.pop("experts_implementation", None)
    group = c.COMPRESSED["config_groups"]["group_0"] | {"targets": ["Linear"]}
    said = c.COMPRESSED | {"ignore": ["lm_head", "re:.*attn.*", "re:.*gate$"], "config_groups": {"group_0": group}}
    tensors = {k: t for k, t in (renamed | changes).items() if t is not None}
    return c.write(folder, tensors, said, **config)


def test_compressed_tensors_are_guarded_in_their_own_convention(tmp_path, monkeypatch):
    backend = oracle.NvFp4MoeBackend.VLLM_CUTLASS
    key = f"{LAYER}.2.down_proj.input_global_scale"
    sound, missing = compressed(tmp_path / "a"), compressed(tmp_path / "b", **{key: None})
    infinite = compressed(tmp_path / "c", **{key: torch.tensor([float("inf")])})
    before = v.Backend(monkeypatch, backend)
    for folder in (sound, missing, infinite):
        stock(folder)  # all three load
    with v.guarded():
        after = v.Backend(monkeypatch, backend)
        stock(sound)
        with pytest.raises(nvfp4.ScaleError, match=r"expert 2: down_proj.input_scale .missing"):
            stock(missing)
        with pytest.raises(nvfp4.ScaleError, match=r"expert 2: down_proj.input_scale = 0 .zero"):
            stock(infinite)
    for a, b in zip(before.seen, after.seen[:2], strict=False):
        assert all(torch.equal(a[k].view(torch.uint8), b[k].view(torch.uint8)) for k in a)


@pytest.mark.parametrize("listed", ("", ".0.gate_proj .0.up_proj .0.down_proj"))
def test_each_way_of_saying_what_is_quantised(listed, healthy, tmp_path):
    """MIXED_PRECISION lists layers or projections; older exports say all of it in hf_quant_config.json."""
    shutil.copytree(healthy, tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    layers = {
        f"model.layers.{i}.mlp.experts{end}": {"quant_algo": "NVFP4"} for i in (0, 1) for end in listed.split(" ")
    }
    config["quantization_config"] = {
        "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers,
    }  # fmt: skip
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    mixed = v.experts(v.load(v.configured(tmp_path / "m", "compiled-moe", dtype="float32")))
    del config["quantization_config"]
    said = {"quant_algo": "NVFP4", "group_size": 16, "kv_cache_quant_algo": None, "exclude_modules": IGNORED}
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    (tmp_path / "m" / "hf_quant_config.json").write_text(
        json.dumps({"producer": {"name": "modelopt"}, "quantization": said})
    )
    separate = v.experts(v.load(v.configured(tmp_path / "m", "compiled-moe", dtype="float32")))
    usual = v.experts(v.load(v.configured(healthy, "compiled-moe", dtype="float32")))
    assert len(usual) == 2
    for a, b, c_ in zip(mixed.values(), separate.values(), usual.values(), strict=True):
        assert torch.equal(run(a), run(c_)) and torch.equal(run(b), run(c_))


@torch.no_grad()
def test_both_conventions_are_served_alike(healthy, tmp_path):
    name = "compiled-moe-w4a4-static"
    a, b = (v.experts(v.load(v.configured(f, name, dtype="float32"))) for f in (healthy, compressed(tmp_path)))
    for one, other in zip(a.values(), b.values(), strict=True):
        assert torch.allclose(run(one), run(other), rtol=1e-5, atol=1e-6)


def test_the_guard_stands_in_front_of_reloads_too(healthy, tmp_path, monkeypatch):
    key, value, message = FAULTS["missing"]
    bad = written("qwen3_moe", tmp_path, **{key: value})
    v.Backend(monkeypatch, oracle.NvFp4MoeBackend.VLLM_CUTLASS)
    config = v.configured(healthy, dtype="bfloat16")
    with v.guarded():
        model = v.load(config)
        layer = v.experts(model)[f"{LAYER}.routed_experts"]
        before = {n: p.clone() for n, p in layer.named_parameters()}
        with set_current_vllm_config(config):
            reload_weights(config, model, None, str(healthy), True)
            after = dict(layer.named_parameters())
            assert before.keys() == after.keys()
            assert all(torch.equal(before[n].view(torch.uint8), after[n].view(torch.uint8)) for n in before)
            with pytest.raises(nvfp4.ScaleError, match=message):
                reload_weights(config, model, None, str(bad), True)


def test_dummy_weights_pass_the_guard(healthy, monkeypatch):
    v.Backend(monkeypatch, oracle.NvFp4MoeBackend.VLLM_CUTLASS)
    with v.guarded():
        stock(healthy, load_format="dummy")
    v.load(v.configured(healthy, "compiled-moe", dtype="float32", load_format="dummy"))


# Our own method.


@torch.no_grad()
@pytest.mark.parametrize("precision", ("w4a16", "w4a4_static", "w4a4_per_token"))
def test_experts_compute_what_they_do_in_transformers(precision, healthy):
    name = "compiled-moe" + ("" if precision == "w4a16" else "-" + precision.replace("_", "-"))
    served = v.experts(v.load(v.configured(healthy, name, dtype="float32")))
    ours = compiled_moe.experts_of(compiled_moe.load(healthy, precision=precision, device="cpu", dtype=torch.float32))
    assert len(served) == len(ours) == 2
    for a, b in zip(served.values(), ours.values(), strict=True):
        assert torch.equal(run(a), b(X, IDS, WEIGHTS))


@torch.no_grad()
@pytest.mark.parametrize("name", ("mixtral", "qwen3_next", "deepseek_v3", "glm4_moe"))
def test_other_architectures(name, tmp_path):
    folder = written(name, tmp_path)
    served = v.experts(v.load(v.configured(folder, "compiled-moe", dtype="float32")))
    ours = compiled_moe.experts_of(compiled_moe.load(folder, device="cpu", dtype=torch.float32))
    assert len(served) == len(ours) > 0
    for a, b in zip(served.values(), ours.values(), strict=True):
        assert torch.equal(run(a), b(X, IDS, WEIGHTS))


@torch.no_grad()
def test_dense_layers_keep_one_scale_a_projection(tmp_path):
    folder = dense(tmp_path)
    served = v.load(v.configured(folder, "compiled-moe", dtype="float32"))
    ours = compiled_moe.load(folder, device="cpu", dtype=torch.float32)
    for a, b in zip(served.model.layers, ours.model.layers, strict=True):
        wide = torch.cat([p(X) for p in (b.self_attn.q_proj, b.self_attn.k_proj, b.self_attn.v_proj)], 1)
        assert torch.equal(a.self_attn.qkv_proj(X)[0], wide)
        assert torch.equal(a.self_attn.o_proj(X)[0], b.self_attn.o_proj(X))
    assert torch.equal(served.lm_head.quant_method.apply(served.lm_head, X), ours.lm_head(X))
    for a, b in zip(v.experts(served).values(), compiled_moe.experts_of(ours).values(), strict=True):
        assert torch.equal(run(a), b(X, IDS, WEIGHTS))


@pytest.mark.parametrize("fault", ("missing", "weight", "block"))
def test_a_missing_scale_is_refused_by_our_method(fault, tmp_path):
    key, value, message = FAULTS[fault]
    folder = written("qwen3_moe", tmp_path, **{key: value})
    with pytest.raises(nvfp4.ScaleError, match=message):
        v.load(v.configured(folder, "compiled-moe-w4a4-static", dtype="float32"))


def test_dense_faults_are_refused(tmp_path):
    key = "model.layers.0.self_attn.k_proj.weight_global_scale"
    folder = dense(tmp_path, **{key: None})
    with pytest.raises(nvfp4.ScaleError, match=r"qkv_proj \(k\): weight_scale_2 .missing"):
        v.load(v.configured(folder, "compiled-moe", dtype="float32"))


@torch.no_grad()
def test_weights_reload_in_place(healthy, tmp_path):
    """A to B to A at the same addresses, as a captured graph needs it; a refused reload leaves the experts alone."""
    other = written("qwen3_moe", tmp_path / "b", **changed(healthy))
    bad = written("qwen3_moe", tmp_path / "c", **{FAULTS["weight"][0]: None})
    config = v.configured(healthy, "compiled-moe", dtype="float32")
    model = v.load(config)
    layer = v.experts(model)[f"{LAYER}.routed_experts"]
    first, places = run(layer), addresses(layer)
    wanted = run(v.experts(v.load(v.configured(other, "compiled-moe", dtype="float32")))[f"{LAYER}.routed_experts"])
    for folder, result in ((other, wanted), (healthy, first)):
        with set_current_vllm_config(config):
            reload_weights(config, model, None, str(folder), True)
        assert torch.equal(run(layer), result) and not torch.equal(first, wanted)
        assert addresses(layer) == places
    with set_current_vllm_config(config), pytest.raises(nvfp4.ScaleError, match=r"expert 1: up_proj.weight_scale_2"):
        reload_weights(config, model, None, str(bad), True)
    assert torch.equal(run(layer), first)


def addresses(layer):
    held = layer.quant_method.weights.tensors
    assert held and all(t.data_ptr() == layer.get_parameter(name).data_ptr() for name, t in held.items())
    return {name: p.data_ptr() for name, p in layer.named_parameters()}


def changed(folder):
    key = f"{LAYER}.2.up_proj.weight"
    from compiled_moe.checkpoint import Checkpoint
    from compiled_moe.shards import Reader

    return {key: Reader().get(Checkpoint.open(folder).headers[key]).clone().flip(0)}


# What is said on the command line.


def test_take_over_needs_no_flag_and_leaves_others_alone(healthy, monkeypatch):
    monkeypatch.setenv(plugin.VARIABLE, "take-over=w4a4_per_token")
    plugin.register()
    try:
        assert v.configured(healthy).model_config.quantization == "compiled-moe-w4a4-per-token"
        assert v.configured(healthy, "compiled-moe", dtype="float32").model_config.quantization == "compiled-moe"
    finally:
        monkeypatch.delenv(plugin.VARIABLE)
        plugin.register()
    assert v.configured(healthy).model_config.quantization == "modelopt_fp4"


def test_a_tensor_of_all_experts_counts_for_each_of_them(healthy, monkeypatch):
    """Llama-4's loader hands over codes and block scales for all experts at once, gate and up together or apart."""
    v.Backend(monkeypatch, oracle.NvFp4MoeBackend.VLLM_CUTLASS)
    seen: list[set] = []
    layers: list = []
    monkeypatch.setattr(guard, "_check", lambda method, layer, record, form: _stop(layers, layer))
    with v.guarded(), contextlib.suppress(_Stop):
        stock(healthy)
    (layer,) = layers
    record = layer.__dict__[guard.RECORD]
    for values in (
        {"w1": torch.zeros(4, 32, 32, dtype=torch.uint8), "w3": torch.zeros(4, 32, 32, dtype=torch.uint8)},
        {"w1": torch.zeros(4, 64, 32, dtype=torch.uint8)},
    ):
        record.clear()
        for shard, value in values.items():
            covered = guard._covered(layer, layer.w13_weight, value, shard, 0)
            for expert, part in covered:
                guard._note(record, layer, layer.quant_method, ("weight", part, expert), "all")
        seen.append(set(record))
    assert seen[0] == seen[1] == {(e, p, "weight") for e in range(4) for p in ("gate_proj", "up_proj")}


class _Stop(Exception):
    pass


def _stop(layers, layer):
    layers.append(layer)
    raise _Stop


def test_scales_of_experts_on_other_ranks_are_looked_at_where_they_are_folded_in(healthy, monkeypatch):
    """Rank 1 of two holds experts 2 and 3; flashinfer's backends take one scale over all four."""
    v.Backend(monkeypatch, oracle.NvFp4MoeBackend.FLASHINFER_CUTLASS)
    layer = v.experts(stock(healthy))[f"{LAYER}.routed_experts"]
    method, form = layer.quant_method, "modelopt"
    assert method.use_global_sf
    layer._expert_map = torch.tensor([-1, -1, 0, 1])
    for name in ("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale", "w2_weight_scale_2"):
        setattr(layer, name, torch.nn.Parameter(getattr(layer, name).data[2:], requires_grad=False))
    layer.w13_weight_scale_2 = torch.nn.Parameter(layer.w13_weight_scale_2.data[2:, None].expand(-1, 2))
    tensors = ("weight", "weight_scale", "weight_scale_2", "input_scale")
    projections = ("gate_proj", "up_proj", "down_proj")
    record = {(e, p, t): ["file"] for e in (0, 1) for p in projections for t in tensors}
    record |= {(e, p, "global input_scale"): ["file"] for e in range(4) for p in projections}

    def refused():
        report = guard._check(method, layer, dict(record), form)
        return {(f.expert, f.projection, f.kind) for f in report.errors}

    assert refused() == set()
    layer.w2_input_scale.data[0] = 0.0  # on rank 0
    layer.w13_input_scale.data[3, 1] = float("nan")  # here, its local expert 1
    del record[1, "gate_proj", "global input_scale"]
    found = {(0, "down_proj", "zero"), (3, "up_proj", "not_finite"), (1, "gate_proj", "missing")}
    assert refused() == found


NAMES = SimpleNamespace(ckpt_gate_proj_name="gate_proj", ckpt_up_proj_name="up_proj", ckpt_down_proj_name="down_proj")


@pytest.mark.parametrize(
    ("ignore", "served"),
    [([], True), (["lm_head"], True), ([f"{LAYER}*"], False), ([f"{LAYER}.*"], False), ([r"re:.*\.0\.mlp.*"], False)],
)
def test_a_layer_of_experts_may_be_left_unquantised(ignore, served):
    config = W4A16.from_config(c.MODELOPT | {"ignore": ignore})
    assert config._experts(NAMES, LAYER) is served
    assert config._experts(NAMES, "model.layers.7.mlp.experts")


def test_experts_are_quantised_whole_or_not_at_all():
    config = W4A16.from_config(c.MODELOPT | {"ignore": ["*down_proj"]})
    with pytest.raises(compiled_moe.CheckpointError, match=r"vLLM runs gate_proj, up_proj, down_proj as one"):
        config._experts(NAMES, LAYER)


@torch.no_grad()
def test_a_router_weight_on_the_input_is_not_one_on_the_output(healthy):
    layer = v.experts(v.load(v.configured(healthy, "compiled-moe", dtype="float32")))[f"{LAYER}.routed_experts"]
    ids, weights = IDS[:, :1].int(), WEIGHTS[:, :1]
    plain = layer.quant_method.apply(layer, X * weights, torch.ones_like(weights), ids, None, None)
    layer.apply_router_weight_on_input = True
    assert torch.equal(layer.quant_method.apply(layer, X, weights, ids, None, None), plain)
