"""Hopper's own kernels on a Hopper: against the reference, bit for bit over replays, and whatever the routing holds."""

import sys
import threading

import pytest
import torch

import nvfp4
from nvfp4 import reference, sm90
from nvfp4.sm90 import compile as build
from nvfp4.sm90 import launch, layout, packing, tiles

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]

BANDS = {  # cosine, relative L2, gain, cosine of the worst token
    "w4a16": (0.9999, 0.01, 0.005, 0.9995),  # the same products in another order; h and partial sums have 8 bits
    # a last bit of h that falls otherwise may move a code, or the scale of a block, by a step; per token it may be the
    # row's largest that falls otherwise, and every scale of that row follows
    "w4a4_per_token": (0.999, 0.04, 0.005, 0.98),
    "w4a4_static": (0.999, 0.04, 0.005, 0.995),
}
FORMS = (
    {"activation": "silu"}, {"activation": "silu", "limit": 1.5}, {"activation": "gelu"}, {"activation": "gelu_tanh"},
    {"activation": "swigluoai", "alpha": 1.702, "beta": 1.0, "limit": 2.0}, {"activation": "swiglustep", "limit": 1.0},
    {"activation": "swigluoai", "alpha": 1.702, "beta": 1.0}, {"activation": "relu2"},
)  # fmt: skip
TOKENS = (1, 3, 17, 64, 300)


@pytest.fixture(autouse=True)
def available():
    assert not (why := sm90.unavailable(torch.device("cuda", 0))), why


def generator(seed):
    return torch.Generator(device="cuda").manual_seed(seed)


def experts(count, hidden, inter, precision="w4a16", seed=0, bias=False, where="cuda", **form):
    """Raw experts of random codes whose outputs are about as large as x, and the same for the reference."""
    rng = generator(seed)
    spec = nvfp4.ExpertsSpec(count, hidden, inter, bias=bias, **form)
    raw = nvfp4.RawExperts.of(spec, device="cuda")
    t = raw.tensors
    for name, k in (("w13", hidden), ("w2", inter)):
        t[name].random_(0, 256, generator=rng)
        t[f"{name}_block_scale"].random_(0x30, 0x40, generator=rng)
        t[f"{name}_global_scale"].uniform_(0.3, 0.5, generator=rng).mul_(k**-0.5)
    for name in ("a13_scale", "a2_scale"):
        t[name].uniform_(2e-3, 4e-3, generator=rng)
    for name in ("w13_bias", "w2_bias") if bias else ():
        t[name].normal_(0, 0.5, generator=rng)
    known = {name: v.clone().contiguous() for name, v in t.items()}
    known["a13_scale"] = known["a13_scale"].amax(1)
    if where == "cpu":
        host = nvfp4.RawExperts.of(spec)
        for name, v in t.items():
            host.tensors[name].copy_(v)
        raw = host
    return raw, [known.get(name) for name in nvfp4.weights.ARGUMENTS]


def finalized(*args, precision="w4a16", **kwargs):
    raw, known = experts(*args, precision=precision, **kwargs)
    weights, _ = nvfp4.finalize(raw, precision, policy="unchecked", device="cuda")
    assert weights.layout == weights.constants()["layout"] == "sm90" and weights.backend == "cuda sm90"
    return weights, known


def routed(tokens, hidden, count, top_k, seed=1, dtype=torch.bfloat16, ids=torch.int32):
    rng = generator(seed)
    x = torch.randn(tokens, hidden, generator=rng, device="cuda").to(dtype)
    chosen = torch.rand(tokens, count, generator=rng, device="cuda").argsort(1)[:, :top_k].to(ids)
    return x, chosen, torch.rand(tokens, top_k, generator=rng, device="cuda") / top_k + 0.1


def expected(weights, known, x, ids, router, expert_map=None, **changes):
    constants = weights.constants() | {"layout": "checkpoint"} | changes
    return reference.moe(x, ids, router, *known, expert_map, **constants)


def close(got, want, precision="w4a16"):
    assert got.dtype == want.dtype and got.shape == want.shape
    if not want.any():
        assert not got.any()
        return
    a, b = got.double(), want.double()
    cosine, error, gain, worst = BANDS[precision]
    assert (a - b).norm() <= error * b.norm(), float((a - b).norm() / b.norm())
    assert (a * b).sum() >= cosine * a.norm() * b.norm()
    assert abs((a * b).sum() / (b * b).sum() - 1) <= gain
    rows = b.norm(dim=1) > 0
    assert torch.nn.functional.cosine_similarity(a[rows], b[rows]).min() >= worst
    assert not a[~rows].any()


@pytest.mark.parametrize("hidden", [2304, 2560, 2688, 2816, 2880])
@pytest.mark.parametrize("inter", [48, 160, 176, 352, 640, 704, 1408, 1856])
def test_sizes(hidden, inter):
    weights, known = finalized(6, hidden, inter)
    for tokens in TOKENS:
        args = routed(tokens, hidden, 6, 4)
        close(weights(*args), expected(weights, known, *args))


@pytest.mark.parametrize("count", [60, 512, 1024])
def test_many_experts(count):
    weights, known = finalized(count, 256, 192)
    for top_k in (1, 4, 6, 10, 22):
        for tokens in TOKENS:
            args = routed(tokens, 256, count, top_k, ids=torch.int64 if top_k == 4 else torch.int32)
            close(weights(*args), expected(weights, known, *args))


@pytest.mark.parametrize("tokens", [3000, 20000])
def test_many_slots(tokens):
    weights, known = finalized(16, 256, 128)
    args = routed(tokens, 256, 16, 4)
    close(weights(*args), expected(weights, known, *args))


@pytest.mark.parametrize("precision", BANDS)
@pytest.mark.parametrize("form", FORMS, ids=lambda f: "-".join(map(str, f.values())))
def test_activations_biases_and_precisions(form, precision):
    for bias in (False, True):
        weights, known = finalized(8, 512, 352, precision=precision, bias=bias, **form)
        for tokens in (1, 20, 700):
            args = routed(tokens, 512, 8, 3)
            close(weights(*args), expected(weights, known, *args), precision)


@pytest.mark.parametrize("tokens", TOKENS)
def test_one_static_scale_for_all_experts(tokens):
    weights, known = finalized(8, 512, 384, precision="w4a4_static")
    known[6], known[7] = known[6][:1], known[7][:1]
    arguments = weights.arguments()
    arguments[6:8] = known[6:8]
    args = routed(tokens, 512, 8, 3)
    got = torch.ops.nvfp4.moe(*args, *arguments, None, **weights.constants())
    close(got, expected(weights, known, *args), "w4a4_static")


@pytest.mark.parametrize("name", tiles.table()[0])
def test_every_tile_at_every_edge(name, monkeypatch):
    """Expert 0 takes just under, exactly and just over whatever a tile holds; others take one row, or none."""
    tile = tiles.table()[0][name]
    monkeypatch.setattr(tiles, "choose", lambda *shape: tile)
    launch.plan.cache_clear()
    weights, known = finalized(5, 320, 96)
    edges = {w + d for w in (0, 8, *tile.widths, 2 * tile.tokens, 3 * tile.tokens) for d in (-1, 0, 1)}
    for rows in sorted(e for e in edges if e > 0):
        x, ids, router = routed(rows + 2, 320, 5, 1)
        ids[:rows], ids[rows], ids[rows + 1] = 0, 2, 4
        close(weights(x, ids, router), expected(weights, known, x, ids, router))
    launch.plan.cache_clear()


@pytest.mark.parametrize("precision", BANDS)
@pytest.mark.parametrize("tokens", TOKENS)
def test_maps_padding_and_duplicates(tokens, precision):
    weights, known = finalized(6, 512, 192, precision=precision)
    for id_type in (torch.int32, torch.int64):
        x, ids, router = routed(tokens, 512, 12, 4, ids=id_type)
        ids[::3, 1], ids[1::4, 0], ids[2::5] = -1, 99, 7
        mapping = torch.tensor([-1, 0, 5, -1, 1, 2, -1, 3, 4, -1, 77, -5], dtype=id_type, device="cuda")
        close(weights(x, ids, router, mapping), expected(weights, known, x, ids, router, mapping), precision)
        x[1::2], ids[1::2] = float("nan"), -1
        got = weights(x, ids, router, mapping)
        close(got, expected(weights, known, x.nan_to_num(0), ids, router, mapping), precision)
        assert not got[1::2].any()
        assert not weights(x, torch.full_like(ids, -1), router).any()


@pytest.mark.parametrize("precision", BANDS)
@pytest.mark.parametrize("tokens", TOKENS[1:])
def test_a_bad_row_stays_in_its_row(tokens, precision):
    weights, _ = finalized(6, 512, 208, precision=precision)
    for fault in (float("nan"), float("inf")):
        x, ids, router = routed(tokens, 512, 6, 4)
        clean = weights(x, ids, router)
        x[1, 77] = fault
        got = weights(x, ids, router)
        others = torch.arange(tokens, device="cuda") != 1
        assert torch.equal(got[others], clean[others]) and not got[1].isfinite().any()


@pytest.mark.parametrize("precision", BANDS)
@pytest.mark.parametrize("tokens", [1, 4, 8, 33, 300])
def test_the_same_bits_over_a_thousand_replays_and_in_eager(tokens, precision):
    weights, _ = finalized(16, 1024, 352, precision=precision)
    x, ids, router = routed(tokens, 1024, 16, 4)
    first = weights(x, ids, router)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = weights(x, ids, router)
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        y.fill_(float("nan"))
        graph.replay()
        differing += (y != first).sum()
    assert int(differing) == 0
    other, chosen, _ = routed(tokens, 1024, 16, 4, seed=9)
    x.copy_(other), ids.copy_(chosen)
    graph.replay()
    assert torch.equal(y, weights(x, ids, router)) and not torch.equal(y, first)


def test_threads_do_not_mix_up_their_tensors():
    """One shape, so one plan; two threads on two streams, each with its own x and weights."""
    made = [finalized(6, 512, 192, seed=s)[0] for s in (0, 1)]
    inputs = [routed(5, 512, 6, 2, seed=s) for s in (2, 3)]
    want = [w(*args) for w, args in zip(made, inputs, strict=True)]
    torch.cuda.synchronize()
    wrong = [0, 0]

    def work(i):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(2000):
                got = made[i](*inputs[i])
                wrong[i] = wrong[i] + (got != want[i]).sum()
            wrong[i] = int(wrong[i])

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=work, args=(i,)) for i in (0, 1)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    sys.setswitchinterval(interval)
    assert wrong == [0, 0]


@pytest.mark.parametrize("where", ["cuda", "cpu"])
def test_a_captured_graph_follows_updated_weights(where):
    shape = (6, 512, 176)
    weights, _ = finalized(*shape, bias=True)
    addresses = {name: t.data_ptr() for name, t in weights.tensors.items()}
    args = routed(5, 512, 6, 2)
    first = weights(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = weights(*args)
    for seed in (7, 0):
        raw, known = experts(*shape, seed=seed, bias=True, where=where)
        weights.update_(raw)
        graph.replay()
        assert torch.equal(y, weights(*args)) and torch.equal(y, first) == (seed == 0)
        close(y, expected(weights, known, *args))
    assert {name: t.data_ptr() for name, t in weights.tensors.items()} == addresses


@pytest.mark.parametrize("tokens", TOKENS)
def test_health_is_the_reference_s(tokens):
    weights, _ = finalized(6, 512, 192)
    x, ids, router = routed(tokens, 512, 6, 2, ids=torch.int64)
    x[0, 3], ids[-1, 0] = float("nan"), 66
    ids[1::3] = -1
    rows = nvfp4.health.buffer(2, 6, "cuda")
    for _ in range(2):
        y = weights(x, ids, router, health=rows[0])
        reference.count_health(x, y, ids, None, 6, rows[1])
    assert nvfp4.health.read(rows[0]) == nvfp4.health.read(rows[1])
    assert torch.equal(y.nan_to_num(1), weights(x, ids, router).nan_to_num(1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("inter", [48, 176, 640])
def test_other_dtypes_read_the_packed_weights(dtype, inter):
    for form in ({}, {"activation": "relu2"}):
        weights, known = finalized(6, 320, inter, bias=True, **form)
        for tokens in (1, 17, 300):
            args = routed(tokens, 320, 6, 4, dtype=dtype)
            close(weights(*args), expected(weights, known, *args))


def test_more_experts_than_counters():
    raw, _ = experts(1025, 16, 16)
    with pytest.raises(nvfp4.NVFP4Error, match="1025 experts are more than 1024"):
        nvfp4.finalize(raw, policy="unchecked", layout="sm90")
    weights, _ = nvfp4.finalize(raw, policy="unchecked")
    assert weights.layout == "checkpoint" and "1025 experts" in nvfp4.explain(weights)


def test_no_tokens_and_views_of_x():
    weights, _ = finalized(6, 320, 96)
    assert weights(*routed(0, 320, 6, 2)).shape == (0, 320)
    x, ids, router = routed(5, 320, 6, 2)
    want = weights(x, ids, router)
    shifted = x.new_zeros(5 * 320 + 3)[3:].view(5, 320).copy_(x)  # not on 16 bytes
    assert torch.equal(weights(shifted, ids, router), want)
    assert torch.equal(weights(x.T.contiguous().T, ids.T.contiguous().T, router), want)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("rows, k", [(2, 64), (80, 144), (176, 2880), (704, 256)])
def test_packing_on_the_device_is_layout_pack(rows, k, gated):
    rng = torch.Generator().manual_seed(0)
    n = rows * (2 if gated else 1)
    codes = torch.randint(0, 256, (3, n, k // 2), dtype=torch.uint8, generator=rng)
    scales = torch.randint(0, 256, (3, n, k // 16), dtype=torch.uint8, generator=rng)
    want = torch.stack([layout.pack(c, s, gated) for c, s in zip(codes, scales, strict=True)])
    store, *views = packing.storage(3, n, k, gated, torch.device("cuda"))
    for view, value in zip(views, (codes, scales), strict=True):
        view.copy_(value)
    for given in (store, None):
        assert torch.equal(packing.pack_experts(*views, gated, given).cpu(), want) or given is None
        views = [codes.cuda(), scales.cuda()]


def test_finalize_packs_in_place():
    raw, _ = experts(32, 1024, 512)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    weights, _ = nvfp4.finalize(raw, policy="unchecked")
    one = 3 * 1024 * 512 * 9 // 16
    assert torch.cuda.max_memory_allocated() - before <= one + 2**20
    assert weights.nbytes <= 32 * one + 2**12


def test_a_first_call_inside_a_capture_is_a_sentence():
    weights, _ = finalized(7, 448, 80)
    build.load.cache_clear()  # as in a new process; what other tests loaded would serve
    launch.plan.cache_clear()
    args = routed(3, 448, 7, 3)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(nvfp4.CaptureError, match=r"nvfp4\.warmup"), torch.cuda.graph(graph):
        weights(*args)
    torch.cuda.synchronize()
    nvfp4.warmup(weights, (3,), top_k=3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = weights(*args)
    graph.replay()
    assert torch.equal(y, weights(*args))


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_whole(mode):
    weights, _ = finalized(6, 512, 192)
    args = routed(8, 512, 6, 2)
    want = weights(*args) * 2
    compiled = torch.compile(lambda *a: weights(*a) * 2, fullgraph=True, mode=mode)
    for _ in range(4):
        got = compiled(*args).clone()
    assert torch.equal(got, want)
