"""The parts of the GPU layers that can be tested without a GPU."""

import contextlib
import time

import pytest
import torch

from graph_tests.discover import resolve, suites
from graph_tests.layers import graphwalk, profile
from graph_tests.layers.bench import Bench
from graph_tests.layers.capture import _topology
from graph_tests.layers.compilehooks import watch_triton
from graph_tests.layers.graphwalk import Node, Walk, differing_words
from graph_tests.layers.lines import LineClock
from graph_tests.layers.tolerance import difference, same_bits, spread


def there(thing):
    assert thing is not None
    return thing


def test_bit_equality_knows_nan_and_minus_zero():
    a = torch.tensor([1.0, float("nan"), 0.0])
    assert same_bits(a, a.clone())
    assert not same_bits(a, torch.tensor([1.0, float("nan"), -0.0]))
    assert same_bits(torch.empty(0, 3), torch.empty(0, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_passes_and_one_wrong_element_does_not(dtype):
    a = torch.linspace(1, 2, 64).to(dtype)
    rounded = (a.float() * (1 + 2 * torch.finfo(dtype).eps)).to(dtype)
    assert difference(a, rounded) is None
    wrong = a.clone()
    wrong[17] = -1
    found = difference(a, wrong)
    assert found is not None and found.index == (17,) and found.moved


def test_nan_on_one_side_is_a_difference():
    a = torch.ones(4)
    b = a.clone()
    b[2] = float("nan")
    assert there(difference(a, b)).index == (2,)
    assert difference(b, b.clone()) is None


def test_integers_are_compared_exactly():
    assert there(difference(torch.tensor([1, 2]), torch.tensor([1, 3]))).index == (1,)


def test_the_callables_own_noise_is_allowed_and_no_more():
    base = torch.ones(8)
    noisy = base + 1e-3
    noise = spread([base, noisy])
    assert noise[0] == pytest.approx(1e-3, rel=1e-3)
    assert difference(base, base + 4e-3, noise) is None
    assert difference(base, base + 4e-2, noise) is not None


def test_results_of_other_shape_or_number_differ():
    assert difference([torch.ones(2)], [torch.ones(3)]) is not None
    assert difference([torch.ones(2)], [torch.ones(2), torch.ones(2)]) is not None


def test_the_line_clock_names_the_line_that_ran():
    marks = []

    def inner():
        marks.append(time.time_ns())
        return 1

    clock = LineClock()
    with clock:
        inner()
        time.sleep(0.002)
        marks.append(time.time_ns())
    assert there(clock.at(marks[0])).text == "marks.append(time.time_ns())"
    assert there(clock.at(marks[0])).function == "inner"
    assert there(clock.at(marks[1])).function == "test_the_line_clock_names_the_line_that_ran"
    assert clock.at(0) is None


def event(name, category, begin, correlation=0, duration_us=1.0):
    return profile.Event(name, category, begin, duration_us, correlation, 1, {})


def test_a_trace_keeps_its_window_and_what_it_caused():
    trace = profile.Trace(
        [
            event(profile.WINDOW, "user_annotation", 1000, duration_us=10),
            event("cudaLaunchKernel", "cuda_runtime", 2000, 7),
            event("cuLaunchKernelEx", "cuda_driver", 3000, 8),
            event("cudaDeviceSynchronize", "cuda_runtime", 99_000, 9),
            event("late", "kernel", 50_000, 7),
            event("before", "kernel", 1500, 1),
            event("cudaLaunchKernel", "cuda_runtime", 10, 1),
            event("unseen launch", "kernel", 4000, 77),
            event("mine::op", "cpu_op", 1900, duration_us=2),
        ]
    )
    assert trace.launches == 2
    assert [e.name for e in trace.executed] == ["late", "unseen launch"]
    assert trace.asked_at(trace.executed[0]) == 2000
    assert trace.custom_op_at(2000) == "mine::op" and trace.custom_op_at(9000) == ""
    assert not [e for e in trace.calls if e.name in profile.HOST_WAITS]


def test_a_trace_without_its_window_is_an_error():
    with pytest.raises(RuntimeError, match="window is missing"):
        profile.Trace([])


def test_another_torch_profiler_is_noticed():
    assert profile.busy() == ""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert "another torch profiler" in profile.busy()


def test_parameters_that_are_addresses_are_not_compared(monkeypatch):
    monkeypatch.setattr(graphwalk, "pointer_kind", lambda address: "device" if address >= 0x7F0000000000 else "")
    word = lambda n: n.to_bytes(8, "little")  # noqa: E731
    a = (word(0x7F0000001000), word(5), b"\x01\x00\x00\x00")
    b = (word(0x7F0000002000), word(6), b"\x01\x00\x00\x00")
    assert differing_words(a, a) == []
    assert differing_words(a, b) == [(1, 0, word(5), word(6))]


def test_topology_names_the_first_node_that_differs():
    kernel = lambda i, grid: Node(i, "kernel", "k", (grid, 1, 1), (32, 1, 1))  # noqa: E731
    one = Walk((kernel(0, 4), kernel(1, 4)), ((0, 1),))
    assert _topology(one, one) is None
    assert there(_topology(one, Walk((kernel(0, 4), kernel(1, 5)), ((0, 1),)))).grid == (5, 1, 1)
    assert there(_topology(one, Walk((kernel(0, 4),), ()))).index == 1
    assert _topology(one, Walk(one.nodes, ())) is one.nodes[0]


def test_triton_hooks_are_taken_out_again():
    from triton import knobs
    from triton.runtime.autotuner import Autotuner

    before = (knobs.runtime.jit_cache_hook, Autotuner._bench, list(knobs.runtime.kernel_load_start_hook.calls))
    with watch_triton([]):
        assert knobs.runtime.jit_cache_hook is not None and Autotuner._bench is not before[1]
    after = (knobs.runtime.jit_cache_hook, Autotuner._bench, list(knobs.runtime.kernel_load_start_hook.calls))
    assert after == before


def test_the_callers_stream_waits_for_a_call_before_its_arguments_can_be_given_to_others(monkeypatch):
    order = []

    class Stream:
        def __init__(self, name):
            self.name = name

        def wait_stream(self, other):
            order.append(f"{self.name} waits for {other.name}")

    bench = Bench.__new__(Bench)
    bench.stream = Stream("bench")  # type: ignore[assignment]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream("caller"))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    bench.call(lambda: order.append("call"), ())
    assert order == ["bench waits for caller", "call", "caller waits for bench"]


def test_a_module_named_after_a_suite_belongs_to_it_and_any_other_is_one_itself():
    assert {"nvfp4", "third_party", "planted"} <= set(suites()) and "nvfp4_model" not in suites()
    assert {place for place, _ in resolve("nvfp4")} == {"graph_tests.cases.nvfp4", "graph_tests.cases.nvfp4_model"}
