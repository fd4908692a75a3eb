"""Under torch.compile: one graph, no recompiles where there should be none, errors that stay clear."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters

import nvfp4

SIZES = (0, 1, 2, 5, 7, 16, 17, 64, 300)


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    counters.clear()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


@pytest.fixture
def routed(make_layer, device):
    """A function x, gate -> y that routes and runs a layer, as a model would."""
    layer = make_layer(hidden=64, inter=32).on(device)

    def run(x, gate, weights=layer.weights):
        ids, router = torch.ops.nvfp4.route(x @ gate, None, top_k=2)
        return torch.ops.nvfp4.moe(x, ids, router, *weights) + x

    return run, torch.randn(64, 4, device=device), layer


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_fullgraph_equals_eager(routed, device, backend):
    run, gate, _ = routed
    x = torch.randn(7, 64, device=device)
    compiled = torch.compile(run, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(x, gate), run(x, gate), rtol=1e-6, atol=1e-6)


def test_dynamic_batch_sizes_share_one_graph(routed, device):
    run, gate, _ = routed
    counter = CompileCounter()
    compiled = torch.compile(run, fullgraph=True, backend=counter)
    for size in [s for s in SIZES if s > 1]:
        x = torch.randn(size, 64, device=device)
        torch._dynamo.mark_dynamic(x, 0)
        torch.testing.assert_close(compiled(x, gate), run(x, gate))
    assert counter.frame_count == 1
    for size in (0, 1):
        x = torch.randn(size, 64, device=device)
        torch.testing.assert_close(compiled(x, gate), run(x, gate))


def test_61_layers_compiled_one_by_one_share_one_graph(make_layer, device):
    layers = [make_layer(seed=s, experts=2, hidden=16, inter=16, top_k=1).on(device) for s in range(61)]
    counter = CompileCounter()

    @torch.compile(fullgraph=True, backend=counter)
    def run(x, ids, router, *weights):
        return torch.ops.nvfp4.moe(x, ids, router, *weights)

    for layer in layers:
        x, ids, router, *weights = layer.args()
        torch.testing.assert_close(run(x, ids, router, *weights), torch.ops.nvfp4.moe(*layer.args()))
    assert counter.frame_count == 1


def test_health_and_probe_under_compile(routed, device):
    _, gate, layer = routed
    health, stats = nvfp4.health.buffer(1, 4, device), torch.zeros(8, dtype=torch.float64, device=device)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def run(x):
        ids, router = torch.ops.nvfp4.route(x @ gate, None, top_k=2)
        y = torch.ops.nvfp4.moe.health(x, ids, router, *layer.weights, None, None, None, None, None, health[0])
        torch.ops.nvfp4.probe(y, stats)
        return y

    x = torch.randn(5, 64, device=device)
    x[2, 3] = float("nan")
    for _ in range(3):
        run(x)
    assert nvfp4.health.read(health[0])["nonfinite_in_rows"] == 3
    assert nvfp4.health.read_probe(stats)["calls"] == 3 and nvfp4.health.read_probe(stats)["nan"] == 3 * 64


CALLS = {
    "moe": lambda x, layer: torch.ops.nvfp4.moe(x, *layer.args()[1:]),
    "moe.health": lambda x, layer: torch.ops.nvfp4.moe.health(
        x, *layer.args()[1:], None, nvfp4.health.buffer(1, 4, x.device)[0]
    ),
    "linear": lambda x, layer: nvfp4.linear(x, layer.weights[0][0], layer.weights[1][0], layer.weights[2][0, :1]),
    "route": lambda x, layer: nvfp4.route(x, top_k=2)[1],
    "quantize": lambda x, layer: nvfp4.quantize(x, torch.ones((), device=x.device))[0],
    "quantize_per_token": lambda x, layer: nvfp4.quantize_per_token(x)[2],
    "probe": lambda x, layer: nvfp4.probe(x, torch.zeros(8, dtype=torch.float64, device=x.device)),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_a_gradient_is_refused(make_layer, device, name, mode):
    layer = make_layer().on(device)
    call = CALLS[name]
    if mode == "compiled":
        call = torch.compile(call, fullgraph=True, backend="aot_eager")
    x = layer.x.clone().requires_grad_()
    with torch.enable_grad(), pytest.raises(Exception, match=r"inference only.*torch\.no_grad"):
        call(x, layer)
    assert CALLS[name](x, layer) is None or not CALLS[name](x, layer).requires_grad
    with torch.inference_mode():
        CALLS[name](x, layer)


@pytest.mark.parametrize("hidden", [2880, 176])
def test_fake_has_the_real_width(make_layer, device, hidden):
    layer = make_layer(tokens=1, experts=2, hidden=hidden, inter=16, top_k=1)
    from torch._subclasses import FakeTensorMode

    real = torch.ops.nvfp4.moe(*layer.args())
    with FakeTensorMode() as mode:
        fake = torch.ops.nvfp4.moe(*[None if t is None else mode.from_tensor(t) for t in layer.args()])
    assert fake.shape == real.shape == (1, hidden) and fake.dtype == real.dtype and fake.stride() == real.stride()


def test_export_keeps_one_node(make_layer):
    layer = make_layer()

    class Model(torch.nn.Module):
        def forward(self, x, ids, router):
            return torch.ops.nvfp4.moe(x, ids, router, *layer.weights)

    exported = torch.export.export(Model(), (layer.x, layer.ids, layer.router))
    names = [str(n.target) for n in exported.graph.nodes if n.op == "call_function"]
    assert names == ["nvfp4.moe.default"]
