"""The layer: exact fixtures, the oracle, every path against the reference within bands, and the rules of every op."""

import math
from dataclasses import replace

import pytest
import torch

import nvfp4
from nvfp4 import format as fmt
from nvfp4 import native, oracle, reference

TOLERANCES = {  # relative L2 against the reference: same operands, other order of summation
    torch.float32: 1e-5,  # a few hundred float32 additions
    torch.bfloat16: 4e-3,  # h and y are rounded to 8 bits; an order change flips some last bits
    torch.float16: 5e-4,
}
DTYPES = [
    torch.float32,
    pytest.param(torch.bfloat16, marks=pytest.mark.gpu),
    pytest.param(torch.float16, marks=pytest.mark.gpu),
]
ACTIVATION_TABLE = {  # (g, u) at limit 7: silu without limit, swigluoai alpha 1.702 beta 1, silu clamped, swiglustep
    (10.0, 10.0): (99.99546, 55.99963, 48.95536, 49.0),
    (2.0, 0.5): (0.880797, 2.903488, 0.880797, 0.880797),
    (7.5, -9.0): (-67.46269, -41.99972, -48.95536, -49.0),
}
FORMS = (
    {"activation": "silu"},
    {"activation": "swigluoai", "alpha": 1.702, "beta": 1.0, "limit": 7.0},
    {"activation": "silu", "limit": 7.0},
    {"activation": "swiglustep", "limit": 7.0},
)


def error(got, want):
    got, want = got.double().cpu(), want.double().cpu()
    return float((got - want).norm() / want.norm())


@pytest.fixture(params=["reference", "cpu", "triton"])
def run(request, triton_ops, device):
    """Each implementation as layer, constants -> y on the CPU."""
    if request.param == "reference":
        return lambda layer, **c: reference.moe(*layer.args(), **c)
    if request.param == "cpu":
        assert native.library() is not None or not native.build().why.startswith("g++"), native.build().why
        return lambda layer, **c: torch.ops.nvfp4.moe(*layer.args(), **c)

    def triton(layer, **constants):
        if device == "cpu" and layer.x.dtype != torch.float32:
            layer = replace(layer, x=layer.x.float())
        return triton_ops["moe"](*layer.on(device).args(), **constants).cpu()

    return triton


@pytest.fixture
def same(request):
    """Bit equality of rows whose neighbours changed; the torch reference may follow the rows of its matrix product."""
    if "reference" in request.node.callspec.id:
        return lambda a, b: error(a, b) < 1e-6
    return torch.equal


def test_matches_the_oracle(make_layer, run):
    layer = make_layer(tokens=3, experts=3, hidden=32, inter=16)
    w13, s13, g13, w2, s2, g2 = layer.weights

    def numbers(w, s):
        return fmt.dequantize_blocks(w, s).tolist()

    want = oracle.moe(
        layer.x.tolist(),
        layer.ids.tolist(),
        layer.router.tolist(),
        numbers(w13, s13),
        g13.tolist(),
        numbers(w2, s2),
        g2.tolist(),
    )
    assert error(run(layer), torch.tensor(want)) < 1e-6


@pytest.mark.parametrize("form", range(4))
@pytest.mark.parametrize("gu", ACTIVATION_TABLE)
def test_activation_values(unit_layer, run, form, gu):
    layer = unit_layer(gate=(gu[0] / 16,) * 2, up=(gu[1] / 16,) * 2, dtype=torch.float32)
    got = run(layer, **FORMS[form])
    assert got[0].tolist() == pytest.approx([ACTIVATION_TABLE[gu][form]] * 16, rel=1e-5)


@pytest.mark.parametrize("g", [-88.0, -30.0, 0.0, 88.0])
@pytest.mark.parametrize("activation", [a for a in fmt.ACTIVATIONS if a != "relu2"])
def test_activation_is_finite_over_the_range_of_exp(unit_layer, run, g, activation):
    got = float(run(unit_layer(gate=(g / 16,) * 2, dtype=torch.float32), activation=activation)[0, 0])
    assert got == pytest.approx(oracle.activate(activation, g, 1.0), rel=1e-5, abs=1e-30)


def test_clamp_at_ten(unit_layer, run):
    got = run(unit_layer(gate=(100 / 16,) * 2, up=(100 / 16,) * 2, dtype=torch.float32), activation="silu", limit=10.0)
    assert float(got[0, 0]) == pytest.approx(10 / (1 + math.exp(-10)) * 10, rel=1e-6)


def test_gate_and_up_keep_their_own_global_scales(unit_layer, run):
    y = run(unit_layer(up=(1 / 16, 1 / 32), dtype=torch.float32))
    assert float(y[0, 0]) == pytest.approx(0.365529, rel=2e-6)  # gate's for both gives .731059, swapped halves .311230


def test_every_scale_byte_is_exact_in_both_products(make_layer, run):
    """Row i has block scale byte i: h_i = s_i^2 by relu2, and w2 picks it out under byte i again: y_i = s_i^3."""
    byte = torch.arange(128, dtype=torch.uint8)
    byte[127] = 0
    w13 = torch.zeros(1, 128, 64, dtype=torch.uint8)
    w13[0, :, 0] = 0x02
    w2 = torch.zeros(1, 128, 64, dtype=torch.uint8)
    w2[0, torch.arange(128), torch.arange(128) // 2] = torch.where(torch.arange(128) % 2 == 0, 0x02, 0x20).byte()
    s13 = byte[None, :, None].repeat(1, 1, 8)
    one, ids = torch.ones(1), torch.zeros(1, 1, dtype=torch.int32)
    x = torch.zeros(1, 128)
    x[0, 0] = 1.0
    weights = (w13, s13, one[:, None], w2, s13.clone(), one)
    layer = replace(make_layer(), x=x, ids=ids, router=torch.ones(1, 1), weights=weights)
    want = byte.view(torch.float8_e4m3fn).double() ** 3  # twelve bits: exact in float32
    assert torch.equal(run(layer, activation="relu2")[0].double(), want) and len(want.unique()) == 127


def test_experts_keep_their_own_global_scales(unit_layer, run):
    for expert, down in ((0, 1.0), (1, 4.0)):
        y = run(unit_layer(down=(1 / 16, 4 / 16), expert=expert, dtype=torch.float32))
        assert float(y[0, 0]) == pytest.approx(down * 0.731059, rel=2e-6)


@pytest.mark.parametrize("precision", fmt.PRECISIONS)
def test_zero_rows_and_blocks_give_zeros_never_nan(make_layer, run, precision):
    """A zero row, zero blocks, and a relu2 that lets nothing through."""
    layer = make_layer(tokens=4, experts=3, gated=False, scales="expert")
    x = layer.x.clone()
    x[1], x[2, 16:48] = 0, 0
    got = run(replace(layer, x=x), activation="relu2", precision=precision)
    assert got.isfinite().all() and not got[1].any() and got[[0, 2, 3]].any(1).all()
    w13 = torch.full_like(layer.weights[0], 0x22)  # all ones: every h is relu(sum of x)^2
    dark = replace(layer, x=-x.abs(), weights=(w13, *layer.weights[1:]))
    assert not run(dark, activation="relu2", precision=precision).any()


@pytest.mark.parametrize("x", [-1.0, 2.0])
def test_relu2_without_a_gate(unit_layer, run, x):
    y = run(unit_layer(x=x, dtype=torch.float32, parts=1), activation="relu2")
    assert y[0].tolist() == [0.0 if x < 0 else 4.0] * 16


def test_bias_comes_after_the_global_scale_and_before_the_activation(unit_layer, run):
    layer = unit_layer(gate=(0.5 / 16,) * 2, up=(0.5 / 16,) * 2, dtype=torch.float32)
    layer = replace(layer, bias13=torch.ones(2, 32), bias2=torch.full((2, 16), 3.0), router=torch.full((1, 1), 0.5))
    assert float(run(layer)[0, 0]) == pytest.approx(0.5 * (1.5 * 1.5 / (1 + math.exp(-1.5)) + 3.0), rel=1e-6)


def test_router_weights_stay_float32(unit_layer, run):
    layer = unit_layer(gate=(1.0, 1.0), dtype=torch.float32)
    one = run(layer)
    more = run(replace(layer, router=torch.full((1, 1), 1 + 2.0**-9)))
    assert torch.equal(more, one * (1 + 2.0**-9)) and not torch.equal(more, one)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("precision", fmt.PRECISIONS)
@pytest.mark.parametrize("activation", ["silu", "relu2"])
def test_triton_agrees_with_the_reference(make_layer, triton_ops, device, dtype, precision, activation):
    for scales in ("expert", "shared") if precision == "w4a4_static" else (None,):
        layer = make_layer(
            tokens=9, experts=5, hidden=96, inter=48, top_k=3, gated=activation != "relu2", bias=True, scales=scales
        )
        layer = layer.on("cpu", dtype)
        constants = {"activation": activation, "precision": precision}
        got = triton_ops["moe"](*layer.on(device).args(), **constants)
        assert got.dtype == dtype and error(got, reference.moe(*layer.args(), **constants)) < TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("precision", fmt.PRECISIONS)
@pytest.mark.parametrize("activation", fmt.ACTIVATIONS)
def test_cpp_agrees_with_the_reference(make_layer, dtype, precision, activation):
    if native.library() is None:
        pytest.skip(native.build().why)
    for scales in ("expert", "shared") if precision == "w4a4_static" else (None,):
        layer = make_layer(
            tokens=9, experts=5, hidden=96, inter=48, top_k=3, gated=activation != "relu2", bias=True, scales=scales
        )
        layer = layer.on("cpu", dtype)
        constants = {"activation": activation, "precision": precision}
        got = torch.ops.nvfp4.moe(*layer.args(), **constants)
        assert got.dtype == dtype and error(got, reference.moe(*layer.args(), **constants)) < TOLERANCES[dtype]


@pytest.mark.parametrize("inter", [16, 48, 176])
@pytest.mark.parametrize("hidden", [16, 80, 144])
def test_sizes_that_are_no_multiple_of_a_tile(make_layer, run, hidden, inter):
    layer = make_layer(tokens=4, experts=6, hidden=hidden, inter=inter, top_k=4)
    assert error(run(layer), reference.moe(*layer.args())) < 1e-5


@pytest.mark.parametrize("bad", [-1, -999999, 4, 2**31 - 1])
@pytest.mark.parametrize("id_type", [torch.int32, torch.int64])
def test_ids_out_of_range_contribute_exactly_zero(make_layer, run, same, bad, id_type):
    layer = make_layer()
    ids = layer.ids.to(id_type)
    ids[0, 1] = bad
    ids[2] = bad
    got = run(replace(layer, ids=ids))
    assert not got[2].any()
    kept = layer.router.clone()
    kept[0, 1] = 0
    assert same(got[[1, 3, 4]], run(layer)[[1, 3, 4]])
    assert error(got[0], run(replace(layer, router=kept))[0]) < 1e-6
    assert not run(replace(layer, ids=torch.full_like(ids, bad))).any()


def test_duplicate_ids_add_up(make_layer, run):
    layer = make_layer(top_k=2)
    twice = replace(layer, ids=torch.full_like(layer.ids, 2))
    once = replace(layer, ids=torch.full_like(layer.ids[:, :1], 2), router=layer.router.sum(1, keepdim=True))
    assert error(run(twice), run(once)) < 1e-6


@pytest.mark.parametrize("precision", ["w4a16", "w4a4_per_token", "w4a4_static"])
@pytest.mark.parametrize("fault", [float("nan"), float("inf"), -float("inf")])
def test_a_bad_row_stays_in_its_row(make_layer, run, fault, precision):
    layer = make_layer(tokens=6, scales="expert")
    x = layer.x.clone()
    x[2, 40] = fault
    clean, got = run(layer, precision=precision), run(replace(layer, x=x), precision=precision)
    others = [0, 1, 3, 4, 5]
    assert torch.equal(got[others], clean[others]) and not got[2].isfinite().all()


def test_no_tokens(make_layer, run):
    assert run(make_layer(tokens=0)).shape == (0, 64)


@pytest.mark.parametrize("tokens", range(1, 34, 4))
def test_padding_rows_are_zero_and_live_rows_do_not_move(make_layer, run, tokens):
    layer = make_layer(tokens=33)
    x, ids = layer.x.clone(), layer.ids.clone()
    x[tokens:], ids[tokens:] = float("nan"), -1
    got = run(replace(layer, x=x, ids=ids))
    zeros = layer.x.clone()
    zeros[tokens:] = 0
    assert torch.equal(got[:tokens], run(replace(layer, x=zeros, ids=ids))[:tokens]) and not got[tokens:].any()
    assert error(got[:tokens], run(layer)[:tokens]) < 1e-6


def test_expert_map_shards_sum_to_the_whole(make_layer, run):
    layer = make_layer(experts=4)
    whole = run(layer)
    parts = []
    for local in ((0, 2), (2, 4)):
        mapping = torch.full((4,), -1, dtype=torch.int32)
        mapping[local[0] : local[1]] = torch.arange(2, dtype=torch.int32)
        shard = replace(layer, weights=tuple(w[slice(*local)].contiguous() for w in layer.weights))
        parts.append(run_with_map(run, shard, mapping))
    assert error(parts[0] + parts[1], whole) < 1e-6
    lonely = replace(layer, ids=torch.tensor([[2, -1]] * 5, dtype=torch.int32))
    shard = replace(lonely, weights=tuple(w[:2].contiguous() for w in layer.weights))
    assert not run_with_map(run, shard, torch.tensor([0, 1, -1, -1])).any()
    padding = replace(shard, ids=torch.tensor([[-1, -2]] * 5, dtype=torch.int32))
    assert not run_with_map(run, padding, torch.tensor([-1, -1, 0, 1])).any()  # -1 is no index from the end


def run_with_map(run, layer, mapping):
    class Mapped:
        x = layer.x

        def args(self):
            return (*layer.args(), mapping)

        def on(self, device):
            moved = layer.on(device)

            class There:
                def args(self):
                    return (*moved.args(), mapping.to(device))

            return There()

    return run(Mapped())


def test_repeated_calls_give_the_same_bits_and_write_no_input(make_layer, run):
    layer = make_layer(tokens=17, scales="expert")
    before = [None if t is None else t.clone() for t in layer.args()]
    first = run(layer, precision="w4a4_static")
    assert all(torch.equal(run(layer, precision="w4a4_static"), first) for _ in range(3))
    assert all(a is None or torch.equal(a, b) for a, b in zip(layer.args(), before, strict=True))


@pytest.mark.parametrize("view", ["transposed", "offset", "strided"])
def test_views_of_x(make_layer, run, view):
    layer = make_layer()
    x = {
        "transposed": layer.x.T.contiguous().T,
        "offset": torch.cat([torch.zeros(1, 3), torch.zeros(5, 3)], 0)
        .new_zeros(5 * 64 + 3)[3:]
        .view(5, 64)
        .copy_(layer.x),
        "strided": torch.stack([layer.x, torch.full_like(layer.x, float("nan"))], 2)[:, :, 0],
    }[view]
    assert torch.equal(run(replace(layer, x=x)), run(layer))


def test_weights_with_zero_experts_stay_silent(make_layer, run):
    layer = make_layer()
    w13, s13, g13, w2, s2, g2 = (w.clone() for w in layer.weights)
    w13[1], w2[1], g13[1], g2[1] = 0, 0, 0, 0
    ids = torch.full_like(layer.ids, 1)
    assert not run(replace(layer, ids=ids, weights=(w13, s13, g13, w2, s2, g2))).any()


def test_static_scales_differ_from_per_token_and_follow_their_values(make_layer, run):
    layer = make_layer(scales="expert")
    y = run(layer, precision="w4a4_static")
    assert not torch.equal(y, run(replace(layer, a13=layer.a13 * 3), precision="w4a4_static"))
    shared = replace(layer, a13=layer.a13[:1], a2=layer.a2[:1])
    spread = replace(layer, a13=layer.a13[:1].expand(4).contiguous(), a2=layer.a2[:1].expand(4).contiguous())
    assert torch.equal(run(shared, precision="w4a4_static"), run(spread, precision="w4a4_static"))


@pytest.mark.parametrize("device_kind", ["cpu", "triton"])
def test_health_counts(make_layer, triton_ops, device, device_kind):
    layer = make_layer(tokens=6, experts=4)
    x, ids = layer.x.clone(), layer.ids.clone()
    x[1, 3] = x[1, 5] = float("nan")
    x[4] = float("nan")
    ids[2] = torch.tensor([-7, 77])
    ids[4] = -1
    layer = replace(layer, x=x, ids=ids)
    row = nvfp4.health.buffer(3, 4, "cpu")[1]
    for _ in range(2):
        if device_kind == "cpu":
            y = torch.ops.nvfp4.moe.health(*layer.args(), None, row)
        else:
            row = row.to(device)
            y = triton_ops["moe.health"](*layer.on(device).args(), None, row)
    got = nvfp4.health.read(row)
    live = [0, 1, 2, 3, 5]
    tokens = [int((ids == e).sum()) for e in range(4)]
    want = {
        "rows": 10, "padding_rows": 2, "ids_out_of_range": 4, "nonfinite_in_rows": 2, "nonfinite_in": 4,
        "nonfinite_out_rows": 2, "nonfinite_out": 128, "amax_in": float(x[live].nan_to_num(0).abs().max()),
        "amax_out": float(y.cpu()[[0, 2, 3, 5]].abs().max()), "tokens": [2 * t for t in tokens],
    }  # fmt: skip
    assert got == want


@pytest.mark.parametrize("implementation", ["cpu", "triton"])
def test_probe(triton_ops, device, implementation):
    x = torch.randn(7, 48, generator=torch.Generator().manual_seed(3))
    x[2], x[3, 4], x[5, 6] = 0, float("nan"), float("inf")
    stats = torch.zeros(8, dtype=torch.float64)
    if implementation == "cpu":
        nvfp4.probe(x, stats)
        nvfp4.probe(x, stats)
    else:
        stats = stats.to(device)
        for _ in range(2):
            triton_ops["probe"](x.to(device), stats)
    finite = x[x.isfinite()].double()
    got = nvfp4.health.read_probe(stats)
    assert got == pytest.approx(
        {"calls": 2, "rows": 14, "elements": 672, "amax": float(finite.abs().max()), "nan": 2, "inf": 2, "zero_rows": 2,
         "rms": float((2 * (finite**2).sum() / 672).sqrt())}, rel=1e-6)  # fmt: skip
