import dataclasses
import json

import pytest

from graph_tests.cures import cure
from graph_tests.verdict import (
    PROOF_LAYERS,
    Check,
    Finding,
    Kind,
    Report,
    Status,
    Verdict,
    Where,
    exit_code,
    judge,
)

PASSING = [Check(name, Status.PASS) for name in PROOF_LAYERS]
FINDING = Finding(Kind.HOST_READ, "item", Where("a.py", 3, "f", "x.item()"), "seen", "cure", 2)
FAILING = Check("static", Status.FAIL, findings=(FINDING,))


def report(verdict=Verdict.PROVEN, checks=(), gpu=True):
    return Report("name", verdict, "why", tuple(checks), gpu)


def test_all_layers_passing_on_a_gpu_is_proven():
    assert judge(PASSING, gpu=True)[0] is Verdict.PROVEN


@pytest.mark.parametrize("layer", PROOF_LAYERS)
@pytest.mark.parametrize("status", [Status.NOT_RUN, Status.INCONCLUSIVE, None])
def test_a_layer_that_is_missing_or_cannot_tell_stands_in_the_way(layer, status):
    checks = [c for c in PASSING if c.name != layer]
    if status is not None:
        checks.append(Check(layer, status, "why", required=False))
    verdict, why = judge(checks, gpu=True)
    assert verdict is Verdict.INCONCLUSIVE and layer in why


def test_compiled_mode_also_needs_the_compile_layer():
    assert judge(PASSING, gpu=True, mode="compiled")[0] is Verdict.INCONCLUSIVE
    assert judge([*PASSING, Check("compile", Status.PASS)], gpu=True, mode="compiled")[0] is Verdict.PROVEN


def test_a_failure_refutes_whatever_else_passed():
    assert judge([*PASSING, FAILING], gpu=True) == (Verdict.REFUTED, "host read: item")
    assert judge([FAILING], gpu=False)[0] is Verdict.STATIC_REFUTED


def test_nothing_is_proven_without_a_gpu():
    static = Check("static", Status.PASS)
    assert judge([*PASSING, static], gpu=False)[0] is Verdict.STATIC_CLEAN
    assert judge([], gpu=False)[0] is Verdict.INCONCLUSIVE
    assert judge([dataclasses.replace(static, status=Status.INCONCLUSIVE)], gpu=False)[0] is Verdict.INCONCLUSIVE


def test_json_round_trip_keeps_everything():
    first = report(Verdict.REFUTED, [FAILING, Check("replay", Status.PASS, size=64)])
    again = Report.from_dict(json.loads(first.to_json()))
    assert again == first
    assert again.findings[0].where == FINDING.where


def test_another_schema_is_refused_in_words():
    data = report().to_dict() | {"schema_version": 99}
    with pytest.raises(ValueError, match="schema version 99"):
        Report.from_dict(data)


def test_the_same_fault_in_two_layers_is_one_finding_with_the_larger_count():
    more = dataclasses.replace(FINDING, count=8, evidence="other")
    merged = report(checks=[FAILING, Check("run time", Status.FAIL, findings=(more,))]).findings
    assert len(merged) == 1 and merged[0].count == 8 and merged[0].evidence == "seen"


def test_sizes_are_judged_apart():
    checks = [dataclasses.replace(c, size=s) for c in PASSING for s in (1, 16)]
    checks.append(dataclasses.replace(FAILING, size=16))
    assert report(checks=checks).sizes == {1: Verdict.PROVEN, 16: Verdict.REFUTED}


@pytest.mark.parametrize(
    ("verdicts", "gpu", "require", "code"),
    [
        ([Verdict.PROVEN], True, True, 0),
        ([Verdict.STATIC_CLEAN], False, False, 0),
        ([Verdict.STATIC_CLEAN], False, True, 3),
        ([Verdict.INCONCLUSIVE, Verdict.PROVEN], True, False, 3),
        ([Verdict.HANG], True, False, 1),
        ([Verdict.CRASH, Verdict.INCONCLUSIVE], True, False, 1),
        ([Verdict.STATIC_REFUTED], False, True, 1),
    ],
)
def test_exit_codes(verdicts, gpu, require, code):
    assert exit_code([report(v, gpu=gpu) for v in verdicts], require) == code


@pytest.mark.parametrize("kind", list(Kind))
def test_every_kind_has_a_cure(kind):
    assert len(cure(kind)) > 20
