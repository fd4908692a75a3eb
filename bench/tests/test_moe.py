"""bench.moe on a machine without a GPU: goals, routing, what verification refuses, peers' arithmetic, tables, plot."""

import argparse
import itertools
import json

import pytest
import torch

from bench import moe, peers, plot_moe, tables
from bench.goals import CROSSOVER, FEW, MEMORY, PREFILL, goal_of, judge
from bench.layer import Layer, Reference
from bench.shapes import SHAPES, Shape

TINY = Shape(256, 128, 4, 2)


@pytest.mark.parametrize(
    "name, tokens, goal",
    [
        ("Qwen3-30B-A3B", 1, FEW), ("DeepSeek-V3", 4, FEW), ("Mixtral-8x7B", 16, MEMORY),
        ("gpt-oss-120b", 1024, MEMORY), ("Qwen3-30B-A3B", 1024, CROSSOVER), ("Qwen3-30B-A3B", 2048, PREFILL),
        ("Mixtral-8x7B", 256, CROSSOVER),
    ],
)  # fmt: skip
def test_regime_by_tokens_and_tokens_per_expert(name, tokens, goal):
    assert goal_of(SHAPES[name], tokens) is goal


def test_floor_is_the_published_one():
    shape = SHAPES["Qwen3-235B-A22B"]
    assert shape.floor_us(1, 8, 4.3e12, 790e12) == pytest.approx(20, abs=0.5)
    assert shape.floor_us(16384, 128, 4.3e12, 790e12) == pytest.approx(6263, abs=5)


@pytest.mark.parametrize(
    "us, peers_us, met, ratio",
    [
        (110, {"a": 140, "b": 150}, True, 140 / 110),  # .91 of the floor, 1.27x
        (110, {"a": 125}, False, 125 / 110),  # the peer could be beaten by 1.2: floor at 100
        (110, {"a": 115}, True, 115 / 110),  # it could not: even the floor is only 1.15x
        (120, {"a": 300}, False, 2.5),
        (110, {}, True, None),
    ],
)
def test_judgement(us, peers_us, met, ratio):
    found = judge(MEMORY, us, 100, peers_us)
    assert found["met"] is met and found["over_peer"] == (None if ratio is None else pytest.approx(ratio))


def test_few_tokens_add_launches_to_the_floor():
    assert judge(FEW, 16, 4.5, {})["met"] and not judge(FEW, 16.5, 4.5, {})["met"]


@pytest.mark.parametrize("routing", moe.ROUTINGS)
def test_routing(routing):
    torch.manual_seed(0)
    shape = Shape(64, 32, 64, 4)
    ids = moe.routing_scores(shape, 512, routing, "cpu").topk(4).indices
    counts = ids.flatten().bincount(minlength=64).sort(descending=True).values
    low, high = {"uniform": (1.0, 2.0), "zipf": (6.0, 16.0), "same": (16.0, 16.0)}[routing]
    assert low <= counts[0] / (512 * 4 / 64) <= high
    assert int((counts > 0).sum()) == (4 if routing == "same" else 64)


@pytest.fixture(scope="module")
def layer():
    torch.manual_seed(0)
    return Layer(TINY, device="cpu")


@pytest.fixture(scope="module")
def batch():
    torch.manual_seed(1)
    ids = torch.rand(40, 4).topk(2).indices.int()
    return torch.randn(40, TINY.hidden).bfloat16(), ids, torch.rand(40, 2).softmax(1)


def test_ours_is_verified_and_wrong_results_are_refused(layer, batch):
    reference = Reference(layer, *batch)
    for precision in layer.weights:
        reference.check(layer.run(*batch, precision), precision)
    wrong = layer.run(*batch, "w4a16")
    wrong[-1] = -wrong[-1]
    with pytest.raises(AssertionError, match="outside"):
        reference.check(wrong, "w4a16")


def test_bfloat16_peers_compute_the_same_layer(layer, batch):
    pytest.importorskip("transformers")
    reference = Reference(layer, *batch)
    w13, w2 = (w.transpose(1, 2) for w in layer.bfloat16)
    reference.check(peers._grouped(batch[0], batch[1], batch[2], w13, w2), "w4a16")
    reference.check(peers.transformers_grouped_mm(layer)(*batch), "w4a16")


def test_steps_around_humming_compute_the_same_layer(layer, batch):
    x, ids, router = batch
    order = ids.flatten().argsort(stable=True)
    sorted_ids = ids.flatten()[order]
    w13, w2 = layer.bfloat16
    h = peers._silu_mul(torch.einsum("sk,snk->sn", peers._gather(x, order, 2), w13[sorted_ids.long()]))
    y = torch.einsum("sk,snk->sn", h, w2[sorted_ids.long()])
    reference = Reference(layer, *batch)
    reference.check(peers._unsorted_sum(y, order, router), "w4a16")
    slots = torch.empty_like(y)
    slots[order] = y
    reference.check(peers._weighted_sum(slots, router), "w4a16")


def test_peers_that_cannot_take_part_say_why(layer, monkeypatch):
    def broken(layer):
        raise ValueError("first line\nsecond line")

    table = {"a": ("no_such_package", broken), "b": ("torch", broken), "c": ("torch", lambda layer: print)}
    monkeypatch.setattr(peers, "PEERS", table)
    found = peers.Peers(layer, table)
    assert [found.get(n) for n in table] == [None, None, print]
    assert found.absent == {"a": "not installed", "b": "ValueError: first line"}
    found.failed("c", RuntimeError("once"))
    assert found.at(1) == ["c"]
    found.failed("c", RuntimeError("twice"))
    assert found.at(1) == [] and found.absent["c"] == "RuntimeError: twice"


def test_points_in_order_of_importance():
    args = moe.parse(["--large", "--skewed", "64"])
    points = moe.points_of(args)
    assert points[0] == (16, "uniform") and points[-3:] == [(64, "zipf"), (64, "same"), (16384, "uniform")]
    assert sorted(t for t, r in points if r == "uniform") == [1, 4, 16, 64, 256, 1024, 2048, 4096, 16384]


def test_a_clock_shares_out_what_is_left(monkeypatch):
    now = itertools.count()
    monkeypatch.setattr(moe.time, "monotonic", lambda: next(now))
    clock = moe.Clock(10, 2)
    clock.next_model()  # at 1 of 10: 4.5 seconds
    assert [clock.over for _ in range(5)] == [False] * 4 + [True]


@pytest.fixture
def result(layer, monkeypatch, tmp_path):
    """A whole run on the CPU, with a clock that is not one."""
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    monkeypatch.setattr(moe, "Layer", lambda shape, layout: layer)
    for name, value in {"graph_us": (20.0, 1.0), "nodes": 5, "host_us": 25.0, "ceilings": (4e12, 8e14)}.items():
        monkeypatch.setattr(moe, name, lambda *args, value=value: value)
    monkeypatch.setattr(moe, "identity", lambda call, replays: {"replays": replays, "differing_from_eager": 0})

    def inputs(shape, tokens, routing="uniform"):
        scores = moe.routing_scores(shape, tokens, routing, "cpu")
        return [(torch.randn(tokens, TINY.hidden).bfloat16(), scores.topk(2).indices, torch.full((tokens, 2), 0.5))] * 2

    def broken(layer):
        return lambda *batch: torch.zeros(batch[0].shape)

    monkeypatch.setattr(moe, "inputs", inputs)
    table = {"transformers grouped_mm bf16": peers.PEERS["transformers grouped_mm bf16"], "wrong": ("torch", broken)}
    monkeypatch.setattr(peers, "PEERS", table | {"none": ("no_such_package", broken)})
    out = tmp_path / "moe_sm90_h200.json"
    shape = ["--shapes", "tiny", "--tokens", "4,64", "--skewed", "64", "--peers", ",".join(peers.PEERS)]
    assert moe.main([*shape, "--out", str(out)]) == 0
    return out


def test_a_run_its_tables_and_its_plot(result, monkeypatch):
    pytest.importorskip("transformers")
    found = json.loads(result.read_text())
    (layer,) = found["layers"]
    assert {"copy_bytes_per_s", "bf16_flops", "machine", "date", "commit"} <= set(found)
    assert [(p["tokens"], p["routing"]) for p in layer["points"]] == [
        (4, "uniform"), (64, "uniform"), (64, "zipf"), (64, "same"),
    ]  # fmt: skip
    first = layer["points"][0]
    assert set(first["times"]) == {"w4a16", "w4a4_per_token", "transformers grouped_mm bf16"}
    assert first["absent"][0]["peer"] == "wrong" and first["over_bf16"] == 1
    assert {a["peer"] for a in layer["absent"]} == {"wrong", "none"} and layer["identity"]["w4a16"]["replays"] == 1000
    monkeypatch.setattr(tables, "RESULTS", result.parent)
    text = tables.render("".join(f"<!-- table moe_sm90_{t} -->\n<!-- end -->\n" for t in ("h200", "launches")))
    assert (
        "| tiny | 64 zipf | 0 | 20 | 1.00 |" in text
        and "| tiny | 4 | 0 | 20 | 1.00 | 20 | " in text
        and "Humming" not in text
    )
    assert "| tiny | w4a16 | 5 | 25-25 | 0 of 1,000 |" in text
    pytest.importorskip("matplotlib")
    assert plot_moe.main([str(result)]) == 0
    assert result.with_suffix(".svg").read_text().count("<svg") == 1


def test_no_time_left_is_told(layer, monkeypatch):
    monkeypatch.setattr(moe, "Layer", lambda shape, layout: layer)
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    clock = moe.Clock(-1, 1)
    clock.next_model()
    args = argparse.Namespace(layout="auto", peers=[], identity=5, precisions=["w4a16"])
    found = moe.measure("tiny", [(1, "uniform")], clock, args)
    assert found["points"] == [] and found["left_out"] == [{"tokens": 1, "routing": "uniform"}]
