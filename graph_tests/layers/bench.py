"""One callable at one size, on the GPU: its inputs, its stream, and what the layers tell each other."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from graph_tests.case import Case
from graph_tests.inputs import InputError, InputMaker, clone_tree, pairs, routings, tensors
from graph_tests.layers.oplog import ApiNames, OpLog
from graph_tests.verdict import Check, Finding, Kind, Status

WARM_CALLS = 3
SEEDS = (1, 2, 3)


class UserError(Exception):
    """The callable, or its make_inputs, raised in a plain eager call; the cause is the user's own exception."""


class Bench:
    """Everything that the GPU layers share for one size."""

    def __init__(self, case: Case, fn: Callable[..., Any], size: int | None) -> None:
        self.case, self.size = case, size
        self.compiled = case.mode == "compiled"
        inner = getattr(fn, "_torchdynamo_orig_callable", None) or getattr(fn, "_orig_mod", None)
        self.eager: Callable[..., Any] = inner if inner is not None else fn
        self.run_fn = fn
        self.capture_fn = fn
        self.maker = InputMaker(case, self.eager, size)
        self.stream = torch.cuda.Stream()
        self.args: tuple[Any, ...] = ()
        self.launches: int | None = None
        self.streams: set[int] = set()
        self.found: list[Finding] = []
        self.broken = ""
        self.capture_stream = 0
        self.warm = case.warm_sizes is None or size in case.warm_sizes
        if self.compiled:
            given = fn is not self.eager
            self.run_fn = fn if given else torch.compile(fn, mode="reduce-overhead", fullgraph=True, dynamic=False)
            self.capture_fn = torch.compile(self.eager, fullgraph=True, dynamic=False)

    def layers(self) -> Iterator[tuple[str, Callable[[], Check]]]:
        """The GPU layers in the order that disturbs the next one least."""
        from graph_tests.layers import capture, customops, replay, runahead, runtime

        ops = ("custom ops", lambda: customops.check_custom_ops(self))
        live = [
            ("run time", lambda: runtime.check_runtime(self)),
            ("run-ahead", lambda: runahead.check_runahead(self)),
        ]
        graphs = [("capture", lambda: capture.check_capture(self)), ("replay", lambda: replay.check_replay(self))]
        if self.compiled:
            from graph_tests.layers import compiled

            order = [ops, ("compile", lambda: compiled.check_compiled(self)), *live, *graphs]
        elif self.warm:
            order = [ops, *live, *graphs]
        else:
            order = [*graphs, ops, *live]
        for name, layer in order:
            yield name, lambda layer=layer: self._remember(layer())  # type: ignore[misc]

    def _remember(self, check: Check) -> Check:
        self.found += check.findings
        return check

    def warm_up(self) -> None:
        """Make the inputs and call the callable as a deployment would before it captures."""
        try:
            self.args = self.maker.make(0)
        except InputError:
            raise
        except Exception as error:
            raise UserError("make_inputs raised") from error
        if not any(t.device.type == "cuda" for t in tensors(self.args)) and tensors(self.args):
            raise InputError("make_inputs gives no tensor on cuda: there is nothing to prove about a GPU")
        if not self.warm:
            return
        for _ in range(WARM_CALLS):
            try:
                self.call(self.eager, clone_tree(self.args))
            except Exception as error:
                raise UserError("the callable raised") from error
        torch.cuda.synchronize()

    def call(self, fn: Callable[..., Any], args: Any) -> Any:
        """Call on the bench's stream, without gradients; does not wait for the device.

        The caller's stream waits for the call's work: results may be read there, and memory of arguments that die
        there may be given to others, as soon as this returns.
        """
        current = torch.cuda.current_stream()
        self.stream.wait_stream(current)
        with torch.no_grad(), torch.cuda.stream(self.stream):
            out = fn(*args)
        current.wait_stream(self.stream)
        return out

    def run(self, args: Any) -> Any:
        """Call the callable as its user would; in compiled mode that begins a new step."""
        if self.compiled:
            torch.compiler.cudagraph_mark_step_begin()
        return self.call(self.run_fn, args)

    def logged(self, args: Any) -> OpLog:
        """Call the eager callable under the operation log, and wait."""
        api = ApiNames()
        log = OpLog(api, args, stream_of=raw_stream)
        with self.logging(api, log):
            self.call(self.eager, args)
        torch.cuda.synchronize()
        return log

    @contextlib.contextmanager
    def logging(self, api: ApiNames, log: OpLog) -> Iterator[None]:
        """Context: operations go to ``log``."""
        with api, log:
            yield

    def variants(self) -> list[tuple[str, int, str]]:
        """(name, seed, routing) of every other set of values to replay with."""
        return [(f"seed {s}", s, "") for s in SEEDS] + [(r, 1, r) for r in routings(self.case.routing)]

    def has(self, *kinds: Kind) -> bool:
        """True when an earlier layer found one of these kinds at this size."""
        return any(f.kind in kinds for f in self.found)

    def skip(self, name: str, why: str) -> Check:
        """The check of a layer that was not run."""
        return Check(name, Status.NOT_RUN, why)

    def close(self) -> None:
        """Let go of what the bench holds."""
        self.args = ()
        torch.cuda.synchronize()
        if self.compiled:  # recorded graphs of one size are not counted for the next
            from torch._inductor.cudagraph_trees import reset_cudagraph_trees

            torch._dynamo.reset()
            reset_cudagraph_trees()


def raw_stream() -> int:
    """The handle of the current stream."""
    return int(torch.cuda.current_stream().cuda_stream)


def static_args(args: Any) -> Any:
    """Static input buffers: clones that captured graphs read."""
    return clone_tree(args)


def rebind(static: Any, new: Any) -> Any:
    """Refill static buffers with new values; what is no tensor is taken from ``new``."""
    from torch.utils._pytree import tree_flatten, tree_unflatten

    for old, value in pairs(static, new):
        old.copy_(value)
    old_leaves, _ = tree_flatten(static)
    new_leaves, spec = tree_flatten(new)
    leaves = [a if isinstance(a, torch.Tensor) else b for a, b in zip(old_leaves, new_leaves, strict=True)]
    return tree_unflatten(leaves, spec)
