"""vLLM's models without its engine: one process, loaded by its real loader on a CPU."""

import contextlib
from types import SimpleNamespace

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.distributed.parallel_state import model_parallel_is_initialized
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model
from vllm.utils.network_utils import get_open_port


def configured(folder, quantization=None, **kwargs):
    return EngineArgs(
        model=str(folder), quantization=quantization, enforce_eager=True, max_model_len=64, skip_tokenizer_init=True,
        kv_cache_memory_bytes=1 << 24, **kwargs,
    ).create_engine_config()  # fmt: skip


def load(config):
    """What a worker does, without a worker."""
    torch.accelerator.empty_cache = lambda: None  # the CPU worker does this too
    with set_current_vllm_config(config):
        if not model_parallel_is_initialized():
            init_distributed_environment(1, 0, f"tcp://127.0.0.1:{get_open_port()}", 0, "gloo")
            initialize_model_parallel(1)
        return get_model(vllm_config=config)


def experts(model):
    return {name: m for name, m in model.named_modules() if type(m).__name__ == "RoutedExperts"}


class Backend:
    """Lets vLLM's own NVFP4 methods load for a backend that a CPU has not.

    Its selection and the kernel object are replaced, and with ``convert=False`` the change to the kernel's layout,
    which needs a GPU; loading, the folding of scales and the quantisation config are vLLM's.
    """

    def __init__(self, monkeypatch, backend, convert=False):
        from vllm.model_executor.layers.quantization import modelopt

        from compiled_moe.engines.vllm import guard

        self.seen: list[dict] = []
        kernels = SimpleNamespace(is_monolithic=lambda: False)
        for module in (modelopt, guard.compressed_tensors):
            monkeypatch.setattr(module, "select_nvfp4_moe_backend", lambda **_: (backend, kernels))
            monkeypatch.setattr(module, "make_nvfp4_moe_kernel", lambda **_: _Kernel)
            if not convert:
                monkeypatch.setattr(module, "convert_to_nvfp4_moe_kernel_format", self._untouched)

    def _untouched(self, **given):
        self.seen.append({k: v.clone() for k, v in given.items() if isinstance(v, torch.Tensor)})
        names = ("w13", "w13_scale", "w13_scale_2", "a13_scale", "w2", "w2_scale", "w2_scale_2", "a2_scale")
        return tuple(given[name] for name in names)


class _Kernel:
    class fused_experts:
        consumes_expert_mask = False

        @staticmethod
        def process_weights_after_loading(layer):
            pass


@contextlib.contextmanager
def guarded():
    """The guard, and vLLM as it was afterwards."""
    from vllm.model_executor.layers.fused_moe.oracle import nvfp4 as oracle

    from compiled_moe.engines.vllm import guard

    held = [(m, n, getattr(m, n)) for m in guard.METHODS for n in ("create_weights", "process_weights_after_loading")]
    held += [(m, guard.INVERTS, getattr(m, guard.INVERTS)) for m in (oracle, guard.modelopt, guard.compressed_tensors)]
    guard.install()
    guard.install()  # twice is once
    try:
        yield
    finally:
        for owner, name, value in held:
            setattr(owner, name, value)
