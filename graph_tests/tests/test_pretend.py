"""What the GPU layers conclude, tested on a pretend device; the real one is in test_gpu.py."""

import dataclasses

import pytest
import torch

from graph_tests.case import LAYERS, Case
from graph_tests.layers import replay, runtime
from graph_tests.tests import sound, table
from graph_tests.tests.faulty import make
from graph_tests.tests.pretend import pretend_gpu  # noqa: F401
from graph_tests.verdict import Kind, Status, Verdict

EXPECTED = table.expected()
LIVE = tuple(layer for layer in LAYERS if layer != "static")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU the real layers are tested")


def live(case, **changes):
    return dataclasses.replace(case, layers=LIVE, **changes)


@pytest.mark.parametrize("name", ["masked-fill", "repeat", "counting", "dropout", "multinomial", "refilled", "moe"])
def test_sound_callables_are_proven(pretend_gpu, name):  # noqa: F811
    report = pretend_gpu(live(EXPECTED[name].case))
    assert report.proved, str(report)


@pytest.mark.parametrize("name", ["counter", "cpu-scalar", "accumulate", "workspace", "hidden-write", "fake-width"])
def test_faulty_callables_are_refuted_with_their_kind(pretend_gpu, name):  # noqa: F811
    report = pretend_gpu(live(EXPECTED[name].case))
    kind, operation, _ = EXPECTED[name].kinds[0]
    assert report.verdict is Verdict.REFUTED, str(report)
    assert any(f.kind is kind and operation in f.operation for f in report.findings), str(report)


def test_an_exception_at_one_size_leaves_the_others_judged(pretend_gpu):  # noqa: F811
    report = pretend_gpu(live(EXPECTED["raises-at-16"].case))
    assert report.sizes == {1: Verdict.PROVEN, 16: Verdict.REFUTED, 64: Verdict.PROVEN}
    assert [f.kind for f in report.findings] == [Kind.EXCEPTION] and report.findings[0].where is not None


@pytest.mark.parametrize("owner", [runtime, replay])
def test_a_layer_that_breaks_is_inconclusive_and_says_why(pretend_gpu, monkeypatch, owner):  # noqa: F811
    monkeypatch.setattr(owner, "Findings", lambda: 1 / 0)
    report = pretend_gpu(live(EXPECTED["masked-fill"].case))
    broken = [c for c in report.checks if c.status is Status.INCONCLUSIVE]
    assert report.verdict is Verdict.INCONCLUSIVE
    assert broken and "the layer itself failed: ZeroDivisionError" in broken[0].why
    assert "Traceback" in broken[0].evidence[0]


def test_constants_make_a_baked_scalar_legal_and_noted(pretend_gpu):  # noqa: F811
    report = pretend_gpu(live(EXPECTED["constant-scalar"].case))
    assert report.proved and any("taken as constant" in note for note in report.notes)


def test_growth_is_found(pretend_gpu, monkeypatch):  # noqa: F811
    levels = iter(range(0, 1_000_000, 512))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: next(levels))
    report = pretend_gpu(live(Case(name="grows", make_inputs=make, fn=sound.masked_fill)))
    assert Kind.MEMORY_GROWTH in [f.kind for f in report.findings]
