"""Reads a captured CUDA graph node by node through cuda-python, child graphs included."""

from __future__ import annotations

import ctypes
import dataclasses
from typing import Any

from graph_tests.layers.driver import CudaError, bindings, ok, pointer_kind

MOST_PARAMETERS = 256
MOST_PACKED = 1 << 15  # bytes; the driver takes no more


@dataclasses.dataclass(frozen=True)
class Node:
    """One node: what it is, and everything the host put into it."""

    index: int
    kind: str
    name: str = ""
    grid: tuple[int, ...] = ()
    block: tuple[int, ...] = ()
    shared: int = 0
    params: tuple[bytes, ...] = ()
    source: str = ""
    target: str = ""
    addresses: tuple[int, int] = (0, 0)
    nbytes: int = 0
    unread: str = ""

    @property
    def shape(self) -> tuple[Any, ...]:
        """What must be the same for all data."""
        return (self.kind, self.name, self.grid, self.block, self.shared, self.nbytes)

    def __str__(self) -> str:
        size = (
            f" grid {self.grid} block {self.block}" if self.grid else f" {self.nbytes:,} bytes" if self.nbytes else ""
        )
        return f"node {self.index}: {self.kind} {self.name}{size}"


@dataclasses.dataclass(frozen=True)
class Walk:
    """All nodes of a graph in creation order (children after their parent node), and its edges."""

    nodes: tuple[Node, ...]
    edges: tuple[tuple[int, int], ...]


def walk(raw_graph: int) -> Walk:
    """Read the graph that ``CUDAGraph.raw_cuda_graph()`` names."""
    driver = bindings()
    nodes: list[Node] = []
    edges: list[tuple[int, int]] = []
    _walk(driver, driver.CUgraph(raw_graph), nodes, edges)
    return Walk(tuple(nodes), tuple(sorted(edges)))


def count_nodes(graph: Any) -> int:
    """How many nodes a graph has, also while it is being captured; child graphs count as one."""
    return int(ok(bindings().cuGraphGetNodes(graph, 0))[1])


def capturing_graph(stream: int) -> Any:
    """The graph that a stream is capturing into, or None."""
    driver = bindings()
    values = ok(driver.cuStreamGetCaptureInfo(driver.CUstream(stream)))
    status, graph = values[0], values[2]
    active = driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
    return graph if status == active else None


def _walk(driver: Any, graph: Any, nodes: list[Node], edges: list[tuple[int, int]]) -> None:
    _, count = ok(driver.cuGraphGetNodes(graph, 0))
    handles = ok(driver.cuGraphGetNodes(graph, count))[0] if count else []
    index_of = {}
    for handle in handles:
        index = len(nodes)
        index_of[int(handle)] = index
        kind = ok(driver.cuGraphNodeGetType(handle))
        node, child = _read(driver, handle, kind, index)
        nodes.append(node)
        if child is not None:
            _walk(driver, child, nodes, edges)
    edges += [(index_of[a], index_of[b]) for a, b in _edges(driver, graph) if a in index_of and b in index_of]


def _edges(driver: Any, graph: Any) -> list[tuple[int, int]]:
    values = ok(driver.cuGraphGetEdges(graph, 0))
    count = int(values[-1])
    if not count:
        return []
    values = ok(driver.cuGraphGetEdges(graph, count))
    return [(int(a), int(b)) for a, b in zip(values[0], values[1], strict=True)]


def _read(driver: Any, handle: Any, kind: Any, index: int) -> tuple[Node, Any]:
    name = str(getattr(kind, "name", kind)).removeprefix("CU_GRAPH_NODE_TYPE_").lower()
    try:
        if name == "kernel":
            return _read_kernel(driver, handle, index), None
        if name == "memcpy":
            return _read_copy(driver, handle, index), None
        if name == "memset":
            p = ok(driver.cuGraphMemsetNodeGetParams(handle))
            value = int(p.value).to_bytes(4, "little")
            nbytes = int(p.width) * int(p.elementSize) * max(int(p.height), 1)
            return Node(index, "memset", params=(value,), nbytes=nbytes), None
        if name == "graph":
            return Node(index, "child graph"), ok(driver.cuGraphChildGraphNodeGetGraph(handle))
    except CudaError as error:
        return Node(index, name, unread=str(error)), None
    return Node(index, name.replace("_", " ")), None


def _read_kernel(driver: Any, handle: Any, index: int) -> Node:
    p = ok(driver.cuGraphKernelNodeGetParams(handle))
    function, kernel = int(p.func), int(getattr(p, "kern", 0) or 0)
    if function:
        name_call, info_call, what = driver.cuFuncGetName, driver.cuFuncGetParamInfo, driver.CUfunction(function)
    else:
        name_call, info_call, what = driver.cuKernelGetName, driver.cuKernelGetParamInfo, driver.CUkernel(kernel)
    try:
        name = ok(name_call(what))
        name = name.decode() if isinstance(name, bytes) else str(name)
    except CudaError:
        name = "kernel"
    params, unread = _params(info_call, what, p)
    return Node(
        index,
        "kernel",
        name,
        (int(p.gridDimX), int(p.gridDimY), int(p.gridDimZ)),
        (int(p.blockDimX), int(p.blockDimY), int(p.blockDimZ)),
        int(p.sharedMemBytes),
        params,
        unread=unread,
    )


def _params(info_call: Any, what: Any, p: Any) -> tuple[tuple[bytes, ...], str]:
    """The bytes of each kernel parameter, and why they could not be read."""
    sizes = []
    for position in range(MOST_PARAMETERS):
        result = info_call(what, position)
        if int(result[0]) != 0:
            break
        sizes.append(int(result[2]))
    base = int(p.kernelParams or 0)
    if not sizes:
        return (), ""
    if not base:
        return _packed_params(int(getattr(p, "extra", 0) or 0))
    pointers = (ctypes.c_void_p * len(sizes)).from_address(base)
    return tuple(ctypes.string_at(a, n) if a else b"" for a, n in zip(pointers, sizes, strict=True)), ""


def _packed_params(extra: int) -> tuple[tuple[bytes, ...], str]:
    """The one buffer of a launch that passed its parameters packed: a list of tags and pointers that ends with 0."""
    end, pointer, size = 0, 1, 2  # CU_LAUNCH_PARAM_END, _BUFFER_POINTER, _BUFFER_SIZE
    found: dict[int, int] = {}
    for position in range(0, 8, 2) if extra else ():
        tag, value = (ctypes.c_void_p * 2).from_address(extra + position * ctypes.sizeof(ctypes.c_void_p))
        if tag is None or tag == end:
            break
        found[int(tag)] = int(value or 0)
    if not found.get(pointer) or not found.get(size):
        return (), "its parameters are stored neither one by one nor packed"
    count = ctypes.c_size_t.from_address(found[size]).value
    if count > MOST_PACKED:
        return (), f"its packed parameters are said to take {count:,} bytes"
    return (ctypes.string_at(found[pointer], count),), ""


def _read_copy(driver: Any, handle: Any, index: int) -> Node:
    p = ok(driver.cuGraphMemcpyNodeGetParams(handle))
    source = _memory(p.srcMemoryType, int(p.srcHost or 0), int(p.srcDevice))
    target = _memory(p.dstMemoryType, int(p.dstHost or 0), int(p.dstDevice))
    nbytes = int(p.WidthInBytes) * max(int(p.Height), 1) * max(int(p.Depth), 1)
    return Node(
        index,
        "memcpy",
        source=source[0],
        target=target[0],
        addresses=(source[1], target[1]),
        nbytes=nbytes,
    )


def _memory(kind: Any, host: int, device: int) -> tuple[str, int]:
    """("device" | "pinned" | "pageable" | ..., address) of one end of a copy."""
    name = str(getattr(kind, "name", kind))
    address = host if "HOST" in name else device or host
    if "ARRAY" in name:
        return "array", 0
    known = pointer_kind(address)
    return {"host": "pinned", "device": "device", "managed": "managed", "array": "array", "": "pageable"}[
        known
    ], address


def is_pointer(word: int) -> bool:
    """True when the driver knows this number as an address."""
    return word >= 1 << 20 and pointer_kind(word) != ""


def differing_words(a: tuple[bytes, ...], b: tuple[bytes, ...]) -> list[tuple[int, int, bytes, bytes]]:
    """(parameter, offset, word, word) wherever two parameter lists differ in something that is no address."""
    found = []
    for position, (one, two) in enumerate(zip(a, b, strict=True)):
        if one == two:
            continue
        offset = 0
        while offset < max(len(one), len(two)):
            left, right = one[offset : offset + 8], two[offset : offset + 8]
            if left != right and not (
                len(left) == len(right) == 8
                and is_pointer(int.from_bytes(left, "little"))
                and is_pointer(int.from_bytes(right, "little"))
            ):
                found.append((position, offset, left, right))
            offset += 8
    return found
