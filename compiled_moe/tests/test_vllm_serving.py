"""The shipped model in real engines, end to end: every way of serving it gives transformers' tokens."""

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import torch

import compiled_moe

from . import serve_once

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed: `make test-engines` installs it and runs this", allow_module_level=True)

pytestmark = pytest.mark.slow
SCRIPT = Path(serve_once.__file__)
BASE = {
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_DISABLE_COMPILE_CACHE": "1",
}  # fmt: skip
WAYS: dict[str, dict] = {
    "eager": {},
    "compiled": {"enforce_eager": False},
    "tensor parallel": {"tensor_parallel_size": 2},
    "expert parallel": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    "taken over": {"quantization": None},
}


def engine(folder, options, *others, **env):
    env = {k: v for k, v in os.environ.items() if k != "VLLM_PLUGINS"} | BASE | env
    if options.get("tensor_parallel_size") == 2:
        env |= {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    command = [sys.executable, str(SCRIPT), str(folder), json.dumps(options), *map(str, others)]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=500, cwd=SCRIPT.parent)


def tokens(done):
    lines = [line for line in done.stdout.splitlines() if line.startswith("TOKENS ")]
    assert done.returncode == 0 and lines, done.stdout[-3000:] + done.stderr[-3000:]
    return [json.loads(line.removeprefix("TOKENS ")) for line in lines]


@pytest.fixture(scope="module")
def wanted():
    """transformers' greedy tokens, by plain from_pretrained."""
    from transformers import AutoModelForCausalLM

    compiled_moe.register_transformers()
    model = AutoModelForCausalLM.from_pretrained(compiled_moe.DEMO, dtype=torch.float32)
    found = []
    for prompt in serve_once.prompts():
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=serve_once.TOKENS, do_sample=False,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        found.append(out[0, ids.shape[1] :].tolist())
    assert len({tuple(row) for row in found}) == 4 and all(len(row) == serve_once.TOKENS for row in found)
    return found


@pytest.mark.parametrize("way", WAYS)
def test_all_tokens_equal_those_of_transformers(way, wanted):
    if "tensor_parallel_size" in WAYS[way] and (os.cpu_count() or 1) < 2:
        pytest.skip("two ranks need two cores")
    env = {"COMPILED_MOE_VLLM": "take-over"} if way == "taken over" else {}
    assert tokens(engine(compiled_moe.DEMO, WAYS[way], **env)) == [wanted]


def test_a_compiled_engine_sees_weights_that_are_reloaded_in_place(wanted, tmp_path):
    other = broken(tmp_path / "m", 11, "up_proj.weight_scale_2", torch.tensor(1e-9))
    for expert in range(16):
        edit(other, f"model.layers.1.mlp.experts.{expert}.down_proj.weight_scale_2", torch.tensor(1e-9))
    first, second, third = tokens(engine(compiled_moe.DEMO, {"enforce_eager": False}, other, compiled_moe.DEMO))
    assert first == third == wanted and second != wanted
    assert tokens(engine(other, {})) == [second]


def broken(folder, expert, tensor, value=None):
    """The shipped model with one tensor of layer 2 taken out, or replaced."""
    shutil.copytree(compiled_moe.DEMO, folder)
    edit(folder, f"model.layers.2.mlp.experts.{expert}.{tensor}", value)
    return folder


def edit(folder, key, value):
    from safetensors.torch import load_file, save_file

    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    del tensors[key]
    save_file(tensors if value is None else tensors | {key: value}, file, metadata={"format": "pt"})


def test_a_missing_scale_stops_the_engine_with_its_name(tmp_path):
    done = engine(broken(tmp_path / "m", 11, "up_proj.weight_scale_2"), {})
    text = done.stdout + done.stderr
    assert done.returncode and "TOKENS" not in done.stdout
    assert re.search(r"model\.layers\.2\.mlp\.experts, expert 11: up_proj\.weight_scale_2 \[missing\]", text), text[
        -3000:
    ]


def test_under_expert_parallelism_experts_are_named_by_their_global_ids(tmp_path):
    folder = broken(tmp_path / "m", 11, "down_proj.weight_scale_2", torch.tensor(float("inf")))
    done = engine(folder, WAYS["expert parallel"])
    text = done.stdout + done.stderr
    assert done.returncode and "expert 11: down_proj.weight_scale_2 = inf [not_finite]" in text, text[-3000:]


def test_vllm_alone_serves_no_nvfp4_experts_on_a_cpu():
    done = engine(compiled_moe.DEMO, {"quantization": None, "dtype": "bfloat16"})
    assert done.returncode and "No NvFp4 MoE backend supports the deployment configuration" in done.stdout + done.stderr


def test_the_server_gives_the_same_tokens(wanted, tmp_path):
    from vllm.utils.network_utils import get_open_port

    port, log = get_open_port(), tmp_path / "log"
    command = [sys.executable, "-m", "compiled_moe.cli", "serve", str(compiled_moe.DEMO), "--dtype", "float32",
               "--max-model-len", "128", "--max-num-seqs", "4", "--kv-cache-memory-bytes", str(64 << 20),
               "--enforce-eager", "--port", str(port)]  # fmt: skip
    with log.open("w") as out:
        server = subprocess.Popen(
            command, stdout=out, stderr=out, env=os.environ | BASE | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
            cwd=tmp_path, start_new_session=True,
        )  # fmt: skip
    try:
        begin = time.monotonic()
        while not _ready(port):
            assert server.poll() is None and time.monotonic() - begin < 300, log.read_text()[-3000:]
            time.sleep(1)
        for prompt, ids in zip(serve_once.prompts(), wanted, strict=True):
            assert _complete(port, prompt) == ids
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(60)


def _ready(port):
    try:
        return urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2).status == 200
    except OSError:
        return False


def _complete(port, prompt):
    body = {"model": str(compiled_moe.DEMO), "prompt": [prompt], "max_tokens": serve_once.TOKENS, "temperature": 0,
            "return_token_ids": True, "ignore_eos": True}  # fmt: skip
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    return json.load(urllib.request.urlopen(request, timeout=120))["choices"][0]["token_ids"]
