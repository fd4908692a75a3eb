"""Which operations read the device, change shape with the data, or cross between host and device.

Names are aten's, without namespace and overload. What is not here is not thereby sound: the run-time layers look at
what really happens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from graph_tests.verdict import Kind

READS = frozenset({"_local_scalar_dense", "item", "is_nonzero", "allclose", "bincount", "_assert_async_host"})
SHAPED_BY_DATA = frozenset(
    {"nonzero", "masked_select", "_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive"}
)
CHECKS_ON_HOST = frozenset(
    {"_linalg_check_errors", "_linalg_eigh", "linalg_eig", "_linalg_eigvals", "linalg_eigvals", "linalg_lu"}
    | {"linalg_lu_factor", "_linalg_svd", "linalg_lstsq", "geqrf", "symeig"}
)
INDEXED = frozenset({"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"})
COPIES = frozenset({"_to_copy", "copy_", "copy", "_copy_from", "to"})
# These Python names say more than the operation they end in.
HOST_NAMES = {
    "tolist": "tolist",
    "item": "item",
    "numpy": "numpy",
    "__array__": "numpy",
    "__bool__": "bool()",
    "__float__": "float()",
    "__int__": "int()",
    "__index__": "int()",
    "__complex__": "complex()",
    "__contains__": "in",
    "__repr__": "repr()",
    "__format__": "format()",
}


def api_name(full: str) -> str:
    """The user's word for a Python function: torch.linalg.inv is called ``linalg_inv`` inside torch."""
    return full.rsplit(".", 1)[-1].removeprefix("linalg_")


def operation_name(op: str, api: str) -> str:
    """What a report calls an operation: the user's own word when the operation's is obscure."""
    name = api_name(api)
    if name in HOST_NAMES and op in ("_local_scalar_dense", "_to_copy", "copy_", "unbind"):
        return HOST_NAMES[name]
    if op in ("_local_scalar_dense", "_linalg_check_errors", "_to_copy") and name and not name.startswith("__"):
        return name
    return {"_local_scalar_dense": "item", "_to_copy": "to"}.get(op, op)


def classify(op: str, api: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Kind | None:
    """The fault that an aten operation on cuda tensors has by its nature, judged from its arguments alone."""
    on_cuda = any(t.device.type == "cuda" for t in _tensors(args))
    if op in COPIES:
        return _classify_copy(op, api, args, kwargs)
    if not on_cuda:
        return None
    if op in SHAPED_BY_DATA:
        return Kind.DATA_SHAPE
    if op in READS:
        return Kind.HOST_READ
    if op in CHECKS_ON_HOST:
        return Kind.HOST_CHECK
    if op == "equal":
        return None if _same_tensor(args[0], args[1]) else Kind.HOST_READ
    if op == "histc":
        low, high = _argument(args, kwargs, 2, "min", 0), _argument(args, kwargs, 3, "max", 0)
        return Kind.HOST_READ if low == 0 and high == 0 else None
    if op == "repeat_interleave" and isinstance(args[0], torch.Tensor):
        return None if kwargs.get("output_size") is not None else Kind.DATA_SHAPE
    if op in INDEXED:
        return _classify_index(args[1])
    return None


def _classify_copy(op: str, api: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Kind | None:
    if op == "copy_" or op == "copy":
        target, source = args[0], args[1]
        if not (isinstance(target, torch.Tensor) and isinstance(source, torch.Tensor)):
            return None
        to, origin = target.device.type, source.device.type
    else:
        device = kwargs.get("device")
        if device is None or not isinstance(args[0], torch.Tensor):
            return None
        to, origin = torch.device(device).type, args[0].device.type
    if (origin, to) == ("cpu", "cuda"):
        return Kind.HOST_TO_DEVICE
    if (origin, to) == ("cuda", "cpu"):
        return Kind.HOST_READ if api_name(api) in HOST_NAMES else Kind.DEVICE_TO_HOST
    return None


def _classify_index(indices: Any) -> Kind | None:
    for index in indices if isinstance(indices, list | tuple) else [indices]:
        if not isinstance(index, torch.Tensor):
            continue
        if index.dtype in (torch.bool, torch.uint8):
            return Kind.DATA_SHAPE
        if index.device.type == "cpu":
            return Kind.HOST_TO_DEVICE
    return None


def is_masked_fill(args: Sequence[Any]) -> bool:
    """``x[mask] = number`` fills in place without a list of indices: no wait."""
    value = args[2] if len(args) > 2 else None
    if not isinstance(value, torch.Tensor) or value.numel() != 1 or value.device.type != "cpu":
        return False
    return all(not isinstance(i, torch.Tensor) or i.dtype in (torch.bool, torch.uint8) for i in args[1])


def _same_tensor(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a is b or (
        a.untyped_storage()._cdata == b.untyped_storage()._cdata
        and a.storage_offset() == b.storage_offset()
        and a.shape == b.shape
        and a.stride() == b.stride()
    )


def _argument(args: Sequence[Any], kwargs: Mapping[str, Any], position: int, name: str, default: Any) -> Any:
    return args[position] if len(args) > position else kwargs.get(name, default)


def _tensors(args: Sequence[Any]) -> list[torch.Tensor]:
    found = []
    for arg in args:
        if isinstance(arg, torch.Tensor):
            found.append(arg)
        elif isinstance(arg, list | tuple):
            found += [a for a in arg if isinstance(a, torch.Tensor)]
    return found
