"""Token by token at static shapes: one compiled step, which is one graph replay on a GPU.

The step keeps everything on the device: token, position, cache and the tokens written so far are buffers that it
updates in place, so a step takes no input and the host has nothing to wait for. The host reads behind, through pinned
memory and an event that it polls.
"""

from __future__ import annotations

import copy
import inspect
import shutil
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .errors import CompiledMoeError

CHUNK = 8
"""Steps launched before the host looks at the tokens of the chunk before, on a GPU."""


class Decoder(nn.Module):
    """Greedy or sampled decoding of one sequence with a transformers causal language model and a static cache."""

    def __init__(
        self, model: Any, max_length: int, *, compile: bool = True, temperature: float = 0.0, seed: int = 0
    ) -> None:
        """Allocate the cache and compile the step.

        Args:
            model: as ``compiled_moe.load`` returns it, or any transformers causal language model.
            max_length: prompt and new tokens together.
            compile: fullgraph; mode "reduce-overhead" on CUDA. Where Inductor cannot work, ``why_eager`` says so.
            temperature: 0 is greedy.
            seed: of the sampling, on the model's device.
        """
        super().__init__()
        from transformers import StaticCache

        self.model, self.max_length, self.temperature = model, max_length, temperature
        self.device = next(model.parameters()).device
        limit = getattr(model.config, "max_position_embeddings", None)
        if limit and max_length > limit:
            raise CompiledMoeError(f"{max_length} tokens in all, but the model has {limit} positions; ask for fewer")
        self.cache = StaticCache(config=model.config, max_cache_len=max_length)
        names = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"
        self.token: Tensor
        self.position: Tensor
        self.history: Tensor
        self.register_buffer("token", torch.zeros(1, 1, dtype=torch.int64, device=self.device))
        self.register_buffer("position", torch.zeros(1, 1, dtype=torch.int64, device=self.device))
        self.register_buffer("history", torch.zeros(max_length, dtype=torch.int64, device=self.device))
        self.why_eager = None if compile else "not asked to compile"
        if compile and self.device.type == "cpu" and not any(shutil.which(c) for c in ("g++", "clang++", "c++")):
            self.why_eager = "no C++ compiler, which torch.compile needs on a CPU: install g++ to compile"
        self._seed, self._started = seed, False
        mode = "reduce-overhead" if self.device.type == "cuda" else None
        self._step = self.forward if self.why_eager else torch.compile(self.forward, fullgraph=True, mode=mode)

    def forward(self) -> None:
        """One step: token and position in, the next ones out, all in the buffers."""
        logits = self._logits(self.token, self.position)
        self.position.add_(1)
        self._choose(logits)

    def _logits(self, ids: Tensor, positions: Tensor) -> Tensor:
        call = {self._cache_name: self.cache}
        return self.model(input_ids=ids, position_ids=positions, use_cache=True, logits_to_keep=1, **call).logits[:, -1]

    def _choose(self, logits: Tensor) -> None:
        logits = logits.float()
        if self.temperature > 0:
            noise = torch.empty_like(logits).exponential_()
            logits = (logits / self.temperature).softmax(-1) / noise
        chosen = logits.argmax(-1, keepdim=True)
        self.token.copy_(chosen)
        self.history.index_copy_(0, self.position[0], chosen[0])

    @torch.inference_mode(False)
    @torch.no_grad()
    def start(self, prompt: Tensor) -> None:
        """Read the prompt, ids [n] on any device, and choose the first new token; forget what was decoded before."""
        n = prompt.numel()
        if not 0 < n < self.max_length:
            raise CompiledMoeError(f"the prompt has {n} tokens; this decoder holds 1 to {self.max_length - 1}")
        if self._started:
            self.cache.reset()
        self._started = True
        torch.manual_seed(self._seed)
        ids = prompt.reshape(1, n).to(self.device)
        logits = self._logits(ids, torch.arange(n, device=self.device)[None])
        self.position.fill_(n)
        self._choose(logits)

    @torch.inference_mode(False)
    @torch.no_grad()
    def step(self) -> None:
        """Decode one token; returns before the GPU has done it."""
        if self.device.type == "cuda" and not self.why_eager:
            torch.compiler.cudagraph_mark_step_begin()
        self._step()

    def warmup(self, prompt: Tensor, steps: int = 3) -> float:
        """Compile and capture: the first step compiles, the second records, the third replays.

        Returns:
            Seconds it took.
        """
        begin = time.perf_counter()
        self.start(prompt)
        for _ in range(min(steps, self.max_length - prompt.numel() - 1)):
            self.step()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - begin

    def stream(self, prompt: Tensor, new_tokens: int, stop: frozenset[int] = frozenset()) -> Iterator[list[int]]:
        """Decode, and yield the new ids in small lists as they become known; ends after an id in ``stop``."""
        self.start(prompt)
        first, done = prompt.numel(), 1
        pending = [self._read(first, 1)]
        while pending:
            while len(pending) < 2 and done < new_tokens:
                count = min(CHUNK if self.device.type == "cuda" else 1, new_tokens - done)
                for _ in range(count):
                    self.step()
                pending.append(self._read(first + done, count))
                done += count
            ids = self._wait(*pending.pop(0))
            ends = [i for i, token in enumerate(ids) if token in stop]
            yield ids[: ends[0]] if ends else ids
            if ends:
                return

    def _read(self, begin: int, count: int) -> tuple[Tensor, torch.cuda.Event | None]:
        """Start copying ``count`` ids to the host."""
        source = self.history[begin : begin + count]
        if self.device.type != "cuda":
            return source.clone(), None
        target = torch.empty(count, dtype=torch.int64, pin_memory=True).copy_(source, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return target, event

    @staticmethod
    def _wait(ids: Tensor, event: torch.cuda.Event | None) -> list[int]:
        while event is not None and not event.query():
            time.sleep(2e-5)
        return ids.tolist()

    def graphs(self) -> int:
        """CUDA graphs that torch.compile has recorded on this device so far; 0 on a CPU."""
        if self.device.type != "cuda" or self.why_eager:
            return 0
        from torch._inductor.cudagraph_trees import get_manager

        manager = get_manager(self.device.index or 0, create_if_none_exists=False)
        return 0 if manager is None else next(copy.copy(manager.graph_counter))
