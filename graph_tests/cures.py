"""How to mend each kind of fault: one sentence, more exact where the operation is known."""

from __future__ import annotations

from graph_tests.verdict import Kind

_BY_OPERATION = {
    "bincount": "count with torch.zeros(n).scatter_add_(0, ids, ones), or torch.histc with min and max given",
    "one_hot": "pass num_classes, so that the width is not read from the data",
    "repeat_interleave": "pass output_size, so that the length is not read from the data",
    "histc": "pass min and max: without them the range is read from the data",
    "equal": "compare on the device: (a == b).all(), and look at it outside the graph",
    "allclose": "use torch.isclose(a, b).all() and look at it outside the graph",
    "nonzero": "use torch.nonzero_static(size=...), a stable argsort, or a mask with torch.where(mask, a, b)",
    "masked_select": "keep the full shape and mask with torch.where(mask, x, 0)",
    "index_put_": "use torch.where(mask, value, x) or x.masked_fill_(mask, number): same shape, no list of indices",
    "index": "index by a tensor of integers on the device, or mask with torch.where(mask, x, 0)",
    "tolist": "keep the counts on the device and let the kernel read them (grouped_mm's offs, a persistent grid)",
    "inv": "use torch.linalg.inv_ex and carry its info tensor on the device",
    "solve": "use torch.linalg.solve_ex and carry its info tensor on the device",
    "cholesky": "use torch.linalg.cholesky_ex and carry its info tensor on the device",
}

_BY_KIND = {
    Kind.HOST_READ: "keep the value on the device: use the tensor itself, torch.where for a branch",
    Kind.DATA_SHAPE: "give every shape before the data is known: pad to the largest size and mask",
    Kind.HOST_TO_DEVICE: "make the tensor once, outside the callable, and pass it or keep it as a buffer",
    Kind.DEVICE_TO_HOST: "return the tensor and copy it to the host outside the callable, after the replay",
    Kind.EXPLICIT_SYNC: "remove the synchronisation: work on one stream is ordered; use events between streams",
    Kind.HOST_CHECK: "use the _ex form of the operation and look at its info tensor outside the callable",
    Kind.CALL_WAITS: "find what waits at this line: a read, a copy from pageable memory, or a lock held by a sync",
    Kind.DEVICE_ALLOCATION: "allocate through torch's caching allocator, once; reuse what warm-up allocated",
    Kind.MEMORY_GROWTH: "drop what each call keeps: a list that grows, a cache keyed by something that always changes",
    Kind.BAKED_SCALAR: "pass the value as a tensor on the device and refill it with copy_; a graph keeps old numbers",
    Kind.BAKED_STATE: "keep the state in a device tensor that the callable updates in place (n.add_(1))",
    Kind.FROZEN_SOURCE: "copy from a pinned buffer that lives as long as the graph, or refill a device buffer outside",
    Kind.STREAM_FORK: "before returning, let the capturing stream wait: current_stream().wait_stream(side)",
    Kind.COMPILE_IN_CAPTURE: "call the kernel once, with these shapes, before capturing",
    Kind.AUTOTUNE_IN_CAPTURE: "tune every size before capturing, or key the tuning on what is constant",
    Kind.ESCAPED: "launch on torch.cuda.current_stream(): work on another stream runs once, now, and never in a replay",
    Kind.HOST_NODE: "remove the host callback: a replay would run Python or C on the CPU between kernels",
    Kind.TOPOLOGY: "launch the same kernels with the same grids for any data; let the kernel read counts itself",
    Kind.CAPTURE_FAILED: "read the evidence: the driver refused something that this line does during a capture",
    Kind.DEAD_INPUT: "keep a reference to every tensor the graph reads for as long as the graph lives",
    Kind.UNINITIALISED: "write every element you read: zero the buffer inside the callable, or mask the rows",
    Kind.NOT_IDEMPOTENT: "reset the buffer inside the callable, or return a fresh tensor: each replay must start anew",
    Kind.OUTPUT_ALIAS: "return a fresh tensor, or a clone of the workspace: the next call overwrites this one",
    Kind.MUTATION: "declare the argument as mutated in the schema (Tensor(a!)), or write to a copy",
    Kind.STALE_WEIGHTS: "read the weight itself in the callable; refresh derived copies where the weight is updated",
    Kind.WRONG_REPLAY: "look for a value or an address that the host fixed at capture time",
    Kind.FAKE_MISMATCH: "make the fake allocate exactly as the operator does: same shape, strides, dtype and device",
    Kind.SPECIALISATION: "keep sizes symbolic in the fake: no int(x.shape[0]), no Python branch on it",
    Kind.ELIMINATED: "declare what the operator writes (Tensor(a!)), or return a tensor that is used",
    Kind.GRAPH_BREAK: "make it trace with torch.compile(fullgraph=True): wrap foreign code in a custom operator",
    Kind.RECOMPILE: "pass what changes as a tensor; make inputs alike (inference_mode, strides) on every call",
    Kind.CUDAGRAPH_SKIPPED: "remove what the evidence names; without graphs each call launches every kernel",
    Kind.EMPTY_BATCH: "return early, without a launch, when the batch is empty",
    Kind.EXCEPTION: "the callable itself raised: make it run eagerly on these inputs first",
}


def cure(kind: Kind, operation: str = "") -> str:
    """One sentence on how to mend a fault of ``kind`` at ``operation``."""
    short = operation.removeprefix("linalg.").split("::")[-1]
    if kind in (Kind.HOST_READ, Kind.DATA_SHAPE, Kind.HOST_CHECK) and short in _BY_OPERATION:
        return _BY_OPERATION[short]
    return _BY_KIND[kind]
