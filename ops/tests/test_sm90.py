"""The packed layout without a GPU: bit for bit, as its kernels decode it, as the portable kernels read it."""

import dataclasses

import numpy as np
import pytest
import torch

import nvfp4
from nvfp4 import format as fmt
from nvfp4.sm90 import compile as build
from nvfp4.sm90 import layout, packing, tiles

DECODE = (  # gemm.cu's, which the model below follows: change both
    "const u32 mask = 0x81C081C0u;",
    "a[0] = times<0>(w & mask, scales);",
    "a[1] = times<1>(w << 6 & mask, scales);",
    "a[2] = times<0>(__funnelshift_r(w, w, 4) & mask, scales);",
    "a[3] = times<1>((w << 2 & 0x80C080C0u) | (w >> 6 & 0x01000100u), scales);",
    "const u32 keep = 0x0FF00FF0u;",
    "0x70007000",
    "decode(w.x, (s.x & keep) | high, frag);",
    "decode(w.y, (__funnelshift_r(s.x, s.x, 8) & keep) | high, frag + 4);",
)


def every_code_and_scale(rows):
    """[rows, 1024]: blocks hold all sixteen codes, turned from block to block; scale bytes go through all 256."""
    turn = torch.arange(64).reshape(1, 64, 1) + torch.arange(rows).reshape(-1, 1, 1)
    values = ((torch.arange(16) + turn) % 16).reshape(rows, 1024).to(torch.uint8)
    scale = (torch.arange(rows).reshape(-1, 1) * 5 + torch.arange(64) * 3) % 256
    return values[:, ::2] | values[:, 1::2] << 4, scale.to(torch.uint8)


@pytest.mark.parametrize("gated", [False, True])
def test_every_code_under_every_scale_comes_back(gated):
    codes, scale = every_code_and_scale(512)
    assert len(scale.unique()) == 256
    got, bytes_ = layout.unpack(layout.pack(codes, scale, gated), 512 // (1 + gated), 1024, gated)
    live = ((scale & 0x7F) != 0).repeat_interleave(8, 1)
    flip = (scale >> 7).repeat_interleave(8, 1) * 0x88
    assert torch.equal(got, torch.where(live, codes ^ flip, 0)) and torch.equal(bytes_, scale & 0x7F)
    assert torch.equal(
        fmt.dequantize_blocks(got, bytes_).nan_to_num(7), fmt.dequantize_blocks(codes, scale).nan_to_num(7)
    )


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows, k", [(16, 16), (48, 80), (64, 64), (80, 144), (176, 64)])
def test_padding_is_zero_and_sizes_come_back(rows, k, gated):
    rng = torch.Generator().manual_seed(0)
    parts = 1 + gated
    codes = torch.randint(0, 256, (parts * rows, k // 2), dtype=torch.uint8, generator=rng)
    scale = torch.randint(1, 127, (parts * rows, k // 16), dtype=torch.uint8, generator=rng)
    packed = layout.pack(codes, scale, gated)
    assert packed.shape == packing.packed_shape(parts * rows, k, gated) and packed.dtype == torch.uint8
    got = layout.unpack(packed, rows, k, gated)
    assert torch.equal(got[0], codes) and torch.equal(got[1], scale)
    tall, wide = -(-rows // 64) * 64, -(-k // 64) * 64
    for values, want in zip(layout.unpack(packed, tall, wide, gated), (codes, scale), strict=True):
        whole = values.unflatten(0, (parts, tall))
        assert torch.equal(whole[:, :rows, : want.shape[1]].flatten(0, 1), want)
        assert not whole[:, rows:].any() and not whole[:, :, want.shape[1] :].any()


def turned(w, by):
    return (w >> np.uint32(by) | w << np.uint32(32 - by)).astype(np.uint32)


def fragments(w):
    """gemm.cu's decode before the products: the four registers of an m64k16 fragment from one word of codes."""
    mask = np.uint32(0x81C081C0)
    last = (w << np.uint32(2) & np.uint32(0x80C080C0)) | (w >> np.uint32(6) & np.uint32(0x01000100))
    return [w & mask, w << np.uint32(6) & mask, turned(w, 4) & mask, last]


def bfloat16(bits):
    return (np.asarray(bits, np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)


def test_the_model_below_is_the_kernels_decode():
    text = (build.FOLDER / "gemm.cu").read_text()
    assert not [line for line in DECODE if line not in text]


def test_decode_takes_each_code_out_of_every_pattern():
    pattern = np.arange(65536, dtype=np.uint32)
    other = pattern * np.uint32(40503) + np.uint32(12345) & np.uint32(0xFFFF)
    for w, mine, theirs, shift in ((pattern | other << np.uint32(16), pattern, other, 0),
                                   (other | pattern << np.uint32(16), pattern, other, 16)):  # fmt: skip
        m, t = mine.astype(int), theirs.astype(int)
        want = (
            (m >> 15 & 1) << 3 | m >> 6 & 7, (m >> 9 & 1) << 3 | m & 7, (t >> 3 & 1) << 3 | m >> 10 & 7,
            (m >> 13 & 1) << 3 | (m >> 14 & 1) << 2 | m >> 4 & 3,
        )  # fmt: skip
        for register, code in zip(fragments(w), want, strict=True):
            assert np.array_equal(register >> np.uint32(shift) & np.uint32(0xFFFF), (code >> 3) << 15 | (code & 7) << 6)


def test_products_of_codes_and_scales_are_exact():
    """Code bits times scale bits, in bfloat16, are the value times 2^-19 for every pair; NaN stays NaN."""
    code = np.arange(16)
    a = bfloat16((code >> 3) << 15 | (code & 7) << 6)
    magnitude = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = np.concatenate([magnitude, -magnitude])
    byte = layout._scale_bytes().numpy().astype(np.uint32)
    scale = bfloat16(byte << 4 | 0x7000)
    want = torch.arange(128, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy() * 2.0**107
    assert np.array_equal(scale[1:127], want[1:127]) and np.isnan(scale[127]) and byte[0] == 0
    product = a[:, None] * scale[None, 1:127]
    assert np.array_equal(product, values[:, None] * want[None, 1:127] * 2.0**-126)
    bits = product.astype(np.float32).view(np.uint32)
    assert not (bits & 0xFFFF).any() and np.array_equal(product, product.astype(np.float32))  # a bfloat16 holds it
    assert np.abs(product[product != 0]).min() >= 2.0**-126  # and no result is subnormal


@pytest.mark.parametrize("gated", [False, True])
def test_threads_find_their_fragments(gated):
    """Every thread's registers, from its 16 + 8 bytes, at the rows and columns of the matrix instruction."""
    codes, scale = every_code_and_scale(128)
    scale = scale & 0x7F
    packed = layout.pack(codes, scale, gated).numpy()
    got = np.empty((packed.shape[0] * 64, packed.shape[1] * 64))
    t = np.arange(128)
    row, column = t // 32 * 16 + t % 32 // 4, t % 4 * 2
    high = np.uint32(0x70007000)
    for b, s in np.ndindex(packed.shape[:2]):
        words = packed[b, s, :2048].view(np.uint32).reshape(128, 4)
        factors = packed[b, s, 2048:].view(np.uint32).reshape(32, 2)[t // 4]
        for k in range(4):
            two = factors[:, k // 2] if k % 2 == 0 else turned(factors[:, k // 2], 8)
            two = (two & np.uint32(0x0FF00FF0)) | high
            for i, register in enumerate(fragments(words[:, k])):
                factor = bfloat16(two >> np.uint32(16 * (i % 2)) & np.uint32(0xFFFF))
                at = b * 64 + row + 8 * (i % 2), s * 64 + 16 * k + column + 8 * (i // 2)
                got[at] = bfloat16(register & np.uint32(0xFFFF)) * factor
                got[at[0], at[1] + 1] = bfloat16(register >> np.uint32(16)) * factor
    if gated:
        got = got.reshape(-1, 2, 8, 1024).swapaxes(0, 1).reshape(-1, 1024)
    want = fmt.dequantize_blocks(codes, scale).double().numpy() * 2.0**-19
    assert np.array_equal(np.nan_to_num(got, nan=7.0), np.nan_to_num(want, nan=7.0))


def packed_weights(layer, kind="sm90", **form):
    """The layer's weights, finalized on the CPU in a layout."""
    experts, hidden, inter = layer.weights[0].shape[0], layer.x.shape[1], layer.weights[3].shape[2] * 2
    bias = layer.bias13 is not None
    precision = form.pop("precision", "w4a16")
    raw = nvfp4.RawExperts.of(nvfp4.ExpertsSpec(experts, hidden, inter, bias=bias, **form))
    names = ("w13", "w13_block_scale", "w13_global_scale", "w2", "w2_block_scale", "w2_global_scale")
    for name, value in zip(names, layer.weights, strict=True):
        raw.tensors[name].copy_(value)
    if bias:
        raw.tensors["w13_bias"].copy_(layer.bias13), raw.tensors["w2_bias"].copy_(layer.bias2)
    if layer.a13 is not None:
        raw.tensors["a13_scale"].copy_(layer.a13[:, None].expand_as(raw.tensors["a13_scale"]))
        raw.tensors["a2_scale"].copy_(layer.a2)
    return nvfp4.finalize(raw, precision, policy="unchecked", layout=kind)[0]


@pytest.mark.parametrize("precision", fmt.PRECISIONS)
@pytest.mark.parametrize("activation", ["silu", "relu2"])
@pytest.mark.parametrize("hidden, inter", [(64, 64), (80, 48), (144, 176)])
def test_portable_kernels_read_it(make_layer, triton_ops, device, hidden, inter, activation, precision):
    layer = make_layer(
        tokens=5, experts=3, hidden=hidden, inter=inter, gated=activation != "relu2", bias=True, scales="expert"
    )
    form = {"activation": activation, "precision": precision}
    both = []
    for kind in ("sm90", "checkpoint"):
        weights = packed_weights(layer, kind, **form)
        there = [None if t is None else t.to(device) for t in (layer.x, layer.ids, layer.router)]
        tensors = [None if t is None else packing_to(t, device) for t in weights.arguments()]
        both.append(triton_ops["moe"](*there, *tensors, **weights.constants()).cpu())
    if hidden == inter:  # no padding: the very same tiles
        assert torch.equal(*both)
    assert (both[0] - both[1]).norm() < 1e-6 * both[1].norm()


def packing_to(t, device):
    """To a device with the strides kept, in a storage where neighbours stay neighbours."""
    base = t._base if t._base is not None else t
    return base.to(device).as_strided(t.size(), t.stride(), t.storage_offset() - base.storage_offset())


def test_the_cpu_reads_it_too_and_the_whole_life_of_packed_weights(make_layer):
    a, b = (make_layer(tokens=5, experts=3, hidden=80, inter=48, seed=s, bias=True) for s in (0, 1))
    weights, plain = packed_weights(a), packed_weights(a, "checkpoint")
    args = (a.x, a.ids, a.router)
    first = weights(*args)
    assert weights.constants()["layout"] == "sm90" and (first - plain(*args)).norm() < 1e-6 * first.norm()
    addresses = {name: t.data_ptr() for name, t in weights.tensors.items()}
    for layer in (b, a):
        raw = nvfp4.RawExperts.of(weights.spec)
        other = packed_weights(layer, "checkpoint")
        for name, value in other.tensors.items():
            raw.tensors[name].copy_(value)
        weights._policy = "unchecked"
        weights.update_(raw)
        assert torch.equal(weights(*args), first) == (layer is a)
    assert {name: t.data_ptr() for name, t in weights.tensors.items()} == addresses
    for e in range(3):
        back = weights.checkpoint(e)
        zero = (a.weights[1][e] & 0x7F) == 0
        assert torch.equal(back["w13_block_scale"], a.weights[1][e])
        assert torch.equal(back["w13"], torch.where(zero.repeat_interleave(8, 1), 0, a.weights[0][e]))


def test_what_is_impossible_is_a_sentence(make_layer, monkeypatch):
    layer = make_layer(experts=3, hidden=80, inter=48)
    weights = packed_weights(layer)
    args, tensors, constants = (layer.x, layer.ids, layer.router), weights.arguments(), weights.constants()
    with pytest.raises(nvfp4.ShapeError, match="take both from"):
        torch.ops.nvfp4.moe(*args, *layer.weights, **constants)  # as on disk
    with pytest.raises(nvfp4.ShapeError, match="take both from"):
        torch.ops.nvfp4.moe(*args, *tensors, None, **constants | {"activation": "relu2"})
    with pytest.raises(nvfp4.ShapeError, match="known are 'checkpoint' and 'sm90'"):
        torch.ops.nvfp4.moe(*args, *tensors, None, **constants | {"layout": "hopper"})
    with pytest.raises(nvfp4.NVFP4Error, match="known are auto, checkpoint, sm90"):
        nvfp4.finalize(nvfp4.RawExperts.of(weights.spec), layout="hopper")

    class Hopper:  # elsewhere: a GPU, and why its kernels cannot serve
        type = "cuda"

    monkeypatch.setattr(nvfp4.weights.sm90, "unavailable", lambda device, experts: "no reason at all")
    with pytest.raises(
        nvfp4.NVFP4Error, match=r"experts: layout 'sm90' cannot be served: no reason.*take 'checkpoint'"
    ):
        nvfp4.weights._layout("sm90", weights.spec, Hopper)
    assert nvfp4.weights._layout("auto", weights.spec, Hopper) == "checkpoint"
    monkeypatch.undo()
    assert packed_weights(layer, "auto").layout == "checkpoint"
    assert "cuda sm90: weights are on cpu" in nvfp4.explain(packed_weights(layer, "auto"))


def test_the_choice_of_a_tile_is_pure_and_covers_everything():
    named, rules = tiles.table()
    assert "slots" not in rules[-1] and "mean" not in rules[-1] and "weights" not in rules[-1]
    seen = set()
    for experts, hidden, inter in (
        (8, 4096, 14336),
        (128, 2048, 768),
        (256, 7168, 2048),
        (512, 2048, 512),
        (1024, 64, 64),
    ):
        for slots in (1, 2, 8, 31, 33, 64, 300, 1024, 4096, 65536, 2**21):
            tile = tiles.choose(slots, experts, hidden, inter)
            tiles.choose.cache_clear()
            assert tile == tiles.choose(slots, experts, hidden, inter)
            seen.add(tile)
    assert seen <= set(named.values()) and len(seen) > 4 and {r["tile"] for r in rules} <= set(named)


WRONG = {
    "multiple of 8 up to 256": {"tokens": 264, "widths": (264,)},
    "ascend to tokens": {"widths": (16, 8)},
    "even number of blocks": {"blocks": 1, "depth": 1},
    "shares out depth": {"split": True, "warpgroups": 4, "blocks": 2, "depth": 2},
    "must fit the 64512": {"registers": (56, 232)},
    "128 where registers": {"registers": (40, 200), "producers": 32},
    "227 KiB": {"stages": 24},
}


@pytest.mark.parametrize("message", WRONG)
def test_a_tile_that_cannot_be_is_refused(message):
    fine = build.Tile(16, (8, 16), 2, 2, 1, 4)
    with pytest.raises(build.KernelBuildError, match=message):
        dataclasses.replace(fine, **WRONG[message])
