"""The static verdict of every case in the table, where there is no GPU."""

import dataclasses
import time

import pytest
import torch

from graph_tests.engine import run_case
from graph_tests.tests import table
from graph_tests.tests.faulty import make
from graph_tests.verdict import Kind, Verdict

EXPECTED = table.expected()
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="with a GPU the whole verdict is tested in test_gpu.py"
)


def static(case):
    return run_case(dataclasses.replace(case, layers=("lint", "static")))


@pytest.mark.parametrize("name", [n for n in EXPECTED if n != "hang"])
def test_static_verdict(name):
    report = static(EXPECTED[name].case)
    assert not table.mismatches(EXPECTED[name], report, gpu=False), str(report)


def test_opaque_operators_are_listed_as_unproven():
    report = static(EXPECTED["opaque"].case)
    assert report.opaque == ("graph_tests_faulty::opaque",)
    assert "unproven (opaque): graph_tests_faulty::opaque" in str(report)


def test_a_triton_launch_is_opaque_and_not_launched():
    assert static(EXPECTED["persistent"].case).opaque == ("triton::persistent_kernel",)


def test_an_endless_loop_on_a_device_value_is_stopped():
    def spin(x, ids):
        while (x.sum() > 0).item():
            x = x + 1
        return x

    report = static(dataclasses.replace(EXPECTED["item"].case, name="spin", fn=spin))
    assert report.verdict is Verdict.STATIC_REFUTED
    assert report.findings[0].kind is Kind.HOST_READ and report.findings[0].count > 900


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (lambda x, ids: x[[0, 2]], Kind.HOST_TO_DEVICE),
        (lambda x, ids: x[x[:, 0] > 0], Kind.DATA_SHAPE),
        (lambda x, ids: x.masked_select(x > 0), Kind.DATA_SHAPE),
        (lambda x, ids: torch.unique(ids), Kind.DATA_SHAPE),
        (lambda x, ids: x.repeat_interleave(ids[:, 0], dim=0), Kind.DATA_SHAPE),
        (lambda x, ids: torch.histc(x), Kind.HOST_READ),
        (lambda x, ids: torch.allclose(x, x + 1), Kind.HOST_READ),
        (lambda x, ids: x if x.sum() > 0 else -x, Kind.HOST_READ),
        (lambda x, ids: x * float(x.amax()), Kind.HOST_READ),
        (lambda x, ids: x.cpu(), Kind.DEVICE_TO_HOST),
        (lambda x, ids: x.cpu().numpy(), Kind.DEVICE_TO_HOST),
        (lambda x, ids: torch.arange(4).to(x.device), Kind.HOST_TO_DEVICE),
        (lambda x, ids: torch.linalg.solve(x[:32, :32], x[:32, :1]), Kind.HOST_CHECK),
        (lambda x, ids: torch.linalg.cholesky(x[:32, :32]), Kind.HOST_CHECK),
        (lambda x, ids: torch.linalg.eigh(x[:32, :32]), Kind.HOST_CHECK),
        (lambda x, ids: torch.cuda.current_stream().synchronize(), Kind.EXPLICIT_SYNC),
    ],
)
def test_each_way_to_wait_is_found(body, kind):
    report = static(dataclasses.replace(EXPECTED["item"].case, name="body", fn=body))
    assert kind in [f.kind for f in report.findings], str(report)


@pytest.mark.parametrize(
    "body",
    [
        lambda x, ids: torch.equal(x, x),
        lambda x, ids: torch.linalg.inv_ex(x[:32, :32]),
        lambda x, ids: torch.where(x > 0, x, 0.0),
        lambda x, ids: x.sort().values.topk(3),
        lambda x, ids: torch.randperm(8, device=x.device),
        lambda x, ids: x[ids[:, 0]],
        lambda x, ids: torch.det(x[:8, :8]),
    ],
)
def test_what_does_not_wait_is_left_alone(body):
    report = static(dataclasses.replace(EXPECTED["item"].case, name="body", fn=body))
    assert report.verdict is Verdict.STATIC_CLEAN, str(report)


def with_a_table(check):
    """An operator over x [M, 256], ids [M, 2] and a row of 17 or 64 numbers, with a fake that holds ``check``."""
    name = f"graph_tests_batch::{check.__name__}"

    @torch.library.custom_op(name, mutates_args=())
    def op(x: torch.Tensor, ids: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        return x * 2

    @op.register_fake
    def _(x, ids, row):
        check(x, ids, row)
        return torch.empty_like(x)

    return lambda x, ids: op(x, ids, torch.zeros(SIZE, device=x.device))


SIZE = 17


def of_another_meaning(x, ids, row):
    assert row.shape[0] == SIZE and ids.shape[0] == x.shape[0], "the row has a width of its own"


def of_every_batch(x, ids, row):
    assert ids.shape[0] == x.shape[0] == row.shape[0], "all three follow the batch"


def specialised_in_the_second(x, ids, row):
    assert row.shape[0] == SIZE and ids.shape[0] == x.shape[0] and int(ids.shape[0]) > 0


@pytest.mark.parametrize(
    ("check", "refuted"), [(of_another_meaning, False), (of_every_batch, False), (specialised_in_the_second, True)]
)
def test_a_size_that_happens_to_equal_the_batch_is_no_specialisation(check, refuted):
    case = dataclasses.replace(
        EXPECTED["item"].case, name="row", fn=with_a_table(check), sizes=(SIZE,), make_inputs=make
    )
    report = static(case)
    assert (Kind.SPECIALISATION in [f.kind for f in report.findings]) == refuted, str(report)


def test_a_helper_and_the_line_that_calls_it_are_both_named():
    def helper(x):
        return x.sum().item()  # inner

    def outer(x, ids):
        return x / helper(x)  # outer

    report = static(dataclasses.replace(EXPECTED["item"].case, name="helper", fn=outer))
    where = report.findings[0].where
    assert where is not None and where.text.endswith("# inner")
    assert [int(text.rsplit(":", 1)[1]) for text in where.called_from] == [outer.__code__.co_firstlineno + 1]
    assert f"called from {where.called_from[0]}" in str(report)


def test_a_module_on_the_cpu_stands_for_one_on_the_gpu_and_comes_back():
    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Parameter(torch.ones(8, 256))
            self.register_buffer("one", torch.ones(1))

        def forward(self, x, ids):
            return x * self.table[ids[:, 0]] * self.one.to(x.device)

    module = Scaled()
    for fn in (module, module.forward, lambda x, ids: module(x, ids)):
        report = static(dataclasses.replace(EXPECTED["item"].case, name="scaled", fn=fn))
        assert report.verdict is Verdict.STATIC_CLEAN, str(report)
    assert module.table.device.type == "cpu" and isinstance(module.table, torch.nn.Parameter)


def test_weights_on_the_cpu_stand_for_weights_on_the_gpu():
    layer = torch.nn.Linear(256, 8)
    report = static(dataclasses.replace(EXPECTED["item"].case, name="linear", fn=lambda x, ids: layer(x)))
    assert report.verdict is Verdict.STATIC_CLEAN, str(report)


def test_inputs_on_the_cpu_stand_for_inputs_on_the_gpu():
    case = dataclasses.replace(
        EXPECTED["item"].case, name="cpu", fn=lambda x: x / x.sum().item(), make_inputs=lambda seed: torch.ones(4, 4)
    )
    report = static(case)
    assert report.verdict is Verdict.STATIC_REFUTED
    assert any("CPU inputs stand for GPU tensors" in note for note in report.notes)


def test_lint_notes_clocks_and_random_numbers():
    import random

    def noisy(x, ids):
        print(time.time(), random.random())
        return x

    report = static(dataclasses.replace(EXPECTED["item"].case, name="noisy", fn=noisy, make_inputs=make))
    assert sum("prints" in n or "clock" in n or "random" in n for n in report.notes) == 3


def test_a_small_static_check_takes_less_than_three_seconds():
    static(EXPECTED["item"].case)
    began = time.monotonic()
    static(EXPECTED["moe"].case)
    assert time.monotonic() - began < 3.0
