"""Every verdict on a GPU: the table, the sound ones, and the tool's own failures."""

import os

import pytest

from graph_tests.tests import battery_report, gpu_battery, table

EXPECTED = table.expected()
JOBS = max(1, (os.cpu_count() or 2) - 4)

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="session")
def reports(request):
    """All chosen cases, judged side by side once: each has a process of its own, so they do not meet."""
    chosen = [i.callspec.params["name"] for i in request.session.items if i.originalname == "test_verdict"]
    return gpu_battery.judge_all(chosen, JOBS)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(EXPECTED))
def test_verdict(name, reports):
    wrong = table.mismatches(EXPECTED[name], reports[name], gpu=True)
    assert not wrong, "; ".join(wrong) + "\n" + battery_report.story(reports[name])


def test_with_another_profiler_attached_a_layer_says_not_run():
    assert gpu_battery.profiler_attached() == ""


@pytest.mark.slow
def test_fifty_refuted_captures_leave_memory_where_it_was():
    assert gpu_battery.refuted_captures(JOBS) == ""
