"""A caller's mistake is a sentence that names the argument, and nothing is converted or ignored in silence."""

from dataclasses import replace

import pytest
import torch

import nvfp4


def moe(layer, **constants):
    return torch.ops.nvfp4.moe(*layer.args(), **constants)


MISTAKES = {
    "float32": lambda la: moe(replace(la, x=la.x.double())),
    r"topk_ids are torch\.uint32": lambda la: moe(replace(la, ids=la.ids.to(torch.uint32))),
    r"topk_ids are torch\.float32": lambda la: moe(replace(la, ids=la.ids.float())),
    "router weights stay float32": lambda la: moe(replace(la, router=la.router.bfloat16())),
    r"top_k\]": lambda la: moe(replace(la, ids=la.ids[:, :1])),
    "w13 is": lambda la: moe(replace(la, weights=(la.weights[0][:, :-2].contiguous(), *la.weights[1:]))),
    "w2 is": lambda la: moe(
        replace(la, weights=(*la.weights[:4], la.weights[4].view(torch.float8_e4m3fn), la.weights[5]))
    ),
    "columns": lambda la: moe(replace(la, x=la.x[:, :32])),
    "global scales": lambda la: moe(replace(la, weights=(*la.weights[:2], la.weights[2][:, 0], *la.weights[3:]))),
    "w4a4_static needs a13_scale": lambda la: moe(la, precision="w4a4_static"),
    "precision is 'fp8'": lambda la: moe(la, precision="fp8"),
    "activation is 'relu'": lambda la: moe(la, activation="relu"),
    "layout is 'tiled'": lambda la: moe(la, layout="tiled"),
    "would ignore": lambda la: moe(la, alpha=1.702),
    "no meaning for gelu": lambda la: moe(la, activation="gelu", limit=7.0),
    "w13_bias must be": lambda la: moe(replace(la, bias13=torch.zeros(4, 32))),
    "contiguous int64": lambda la: torch.ops.nvfp4.moe.health(*la.args(), None, torch.zeros(4)),
    "multiple of 16": lambda la: nvfp4.quantize(torch.randn(2, 24), torch.ones(())),
    "one float32": lambda la: nvfp4.quantize(torch.randn(2, 32), torch.ones(2)),
    r"need \[tokens, experts\]": lambda la: nvfp4.route(torch.randn(3), top_k=1),
    "1 <= top_k": lambda la: nvfp4.route(torch.randn(3, 4), top_k=5),
    "scoring is 'tanh'": lambda la: nvfp4.route(torch.randn(3, 4), top_k=1, scoring="tanh"),
    r"float64 \[8\]": lambda la: nvfp4.probe(torch.randn(3, 4), torch.zeros(8)),
    r"\[N, 64/2\]": lambda la: nvfp4.linear(la.x, la.weights[0][0, :, :-1], la.weights[1][0], torch.ones(1)),
    "view e4m3 as uint8": lambda la: torch.ops.nvfp4.dequantize(
        la.weights[0], la.weights[1].view(torch.float8_e4m3fn), torch.ones(1), torch.float32
    ),
}


@pytest.mark.parametrize("message", MISTAKES)
def test_mistakes_are_sentences(make_layer, message):
    with pytest.raises(nvfp4.ShapeError, match=message):
        MISTAKES[message](make_layer())


@pytest.mark.gpu
def test_tensors_on_two_devices(make_layer):
    layer = make_layer()
    with pytest.raises(nvfp4.ShapeError, match="topk_ids is on cpu, x on cuda:0"):
        moe(replace(layer, x=layer.x.cuda()))


def test_import_touches_no_cuda_and_no_environment():
    import subprocess
    import sys

    code = (
        "import os; before = dict(os.environ); import torch, nvfp4, compiled_moe; "
        "assert not torch.cuda.is_initialized(); assert dict(os.environ) == before; "
        "pid = os.fork(); os._exit(0) if pid == 0 else os.waitpid(pid, 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("position", [5, 8, 11, 13])
def test_strided_scales_biases_and_maps_are_refused(position, make_layer):
    layer = make_layer(bias=True)
    args = [*layer.args(), torch.arange(4, dtype=torch.int32)]
    args[position] = torch.stack([args[position]] * 2, -1)[..., 0]
    with pytest.raises(nvfp4.ShapeError, match="contiguous"):
        torch.ops.nvfp4.moe(*args)
