"""Which experts layers a checkpoint holds, how large they are, and which part of which file fills which slot.

All of it comes from headers: sizes are checked against each other before anything is read or allocated.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from nvfp4 import ExpertsSpec, NVFP4Error

from .errors import CheckpointError
from .names import MX_SCALE, ExpertKey
from .parts import DTYPES, SCALARS, Part, need
from .shards import Header

_QUANTISED = ("weight_scale", "weight_scale_2", MX_SCALE)
Keys = list[tuple[ExpertKey, Header]]


@dataclass(frozen=True)
class Layer:
    """One layer of experts on disk.

    Attributes:
        spec: sizes; the activation only says whether there is a gate.
        parts: in the order of the files.
    """

    spec: ExpertsSpec
    parts: tuple[Part, ...]

    @property
    def name(self) -> str:
        """The experts module, as the files call it."""
        return self.spec.layer

    @property
    def weights(self) -> dict[tuple[int, str], Part]:
        """(expert, projection) to the part with its codes."""
        return {(p.expert, p.projection): p for p in self.parts if p.tensor == "weight"}


def expert_layers(headers: dict[str, Header], model_type: str = "") -> list[Layer]:
    """The quantised experts layers of a checkpoint, in the order of its files.

    Args:
        headers: every key. model_type: config.json's; gpt_oss interleaves the rows of gate and up.

    Raises:
        CheckpointError: a dtype, shape or number of experts that cannot be; names the key.
    """
    grouped: dict[str, Keys] = defaultdict(list)
    for key, header in headers.items():
        parsed = ExpertKey.parse(key)
        if parsed is not None:
            grouped[parsed.layer].append((parsed, header))
    return [
        _layer(name, keys, model_type)
        for name, keys in grouped.items()
        if any(key.tensor in _QUANTISED for key, _ in keys)
    ]


def _layer(name: str, keys: Keys, model_type: str) -> Layer:
    for key, header in keys:
        if key.tensor == "pre_quant_scale":
            raise CheckpointError(
                f"{header.source}: this is an AWQ checkpoint, whose pre_quant_scale divides the activations; it is not "
                "applied here, and leaving it out would be silently wrong: export with NVFP4 instead"
            )
        allowed = DTYPES[key.tensor]
        need(header.dtype in allowed, header, header.dtype, f"{' or '.join(allowed)} for {key.tensor}")
    fused = [key.expert is None for key, _ in keys]
    if any(fused) and not all(fused):
        one = keys[fused.index(True)][1].key
        raise CheckpointError(f"{name} holds experts one by one, and all in one tensor: {one}; keep one of the two")
    gated = any(key.projection in ("gate_proj", "gate_up_proj") for key, _ in keys)
    bias = any(key.tensor == "bias" for key, _ in keys)
    try:
        make = _fused if fused[0] else _separate
        spec, parts = make(name, keys, "silu" if gated else "relu2", bias, model_type)
    except NVFP4Error as error:
        raise CheckpointError(str(error)) from error
    return Layer(spec, tuple(_with_codes(parts)))


def _with_codes(parts: list[Part]) -> list[Part]:
    """Give every MXFP4 scale the part that holds its codes."""
    weights = {(p.expert, p.projection): p for p in parts if p.tensor == "weight"}
    return [
        Part(**(vars(p) | {"codes": weights.get((p.expert, p.projection))})) if p.tensor == MX_SCALE else p
        for p in parts
    ]


def _slot_name(projection: str, activation: str) -> str:
    """Where there is no gate, the one projection into the layer takes the first slot."""
    return "gate_proj" if activation == "relu2" and projection == "up_proj" else projection


def _separate(name: str, keys: Keys, activation: str, bias: bool, _: str) -> tuple[ExpertsSpec, list[Part]]:
    first = {key.projection: header for key, header in reversed(keys) if key.tensor == "weight"}
    into = first.get("gate_proj" if activation == "silu" else "up_proj")
    if into is None or len(into.shape) != 2:
        raise CheckpointError(
            f"{name}: no two-dimensional gate_proj.weight or up_proj.weight (w1, w3), such as {keys[0][1].source}, "
            "tells the sizes of the experts"
        )
    rows, packed = into.shape
    count = _count(name, {key.expert for key, _ in keys if key.expert is not None})
    spec = ExpertsSpec(count, 2 * packed, rows, activation, bias, name)
    parts = []
    for key, header in keys:
        assert key.expert is not None
        part = Part(key.expert, _slot_name(key.projection, activation), key.tensor, header, key.encode)
        _need_shape(header, _wanted(part.projection, key.tensor, spec))
        parts.append(part)
    return spec, parts


def _count(name: str, ids: set[int]) -> int:
    """Number of experts; ids must be dense enough to be those of one layer."""
    count = max(ids) + 1
    if count > 2 * len(ids) + 8:
        raise CheckpointError(
            f"{name} has {len(ids)} experts, one of them with id {count - 1}; ids run from 0 without such gaps"
        )
    return count


def _wanted(projection: str, tensor: str, spec: ExpertsSpec) -> tuple[int, ...]:
    n, k = spec.shape(projection)
    if tensor == "weight":
        return n, k // 2
    if tensor == "weight_scale":
        return n, k // 16
    if tensor == MX_SCALE:
        return n, k // 32
    return (n,) if tensor == "bias" else ()


def _need_shape(header: Header, wanted: tuple[int, ...]) -> None:
    ok = header.shape == wanted or (wanted == () and header.shape == (1,))
    need(ok, header, f"{header.dtype} {header.shape}", f"{wanted or '() or (1,)'} for this layer's sizes")


def _fused(name: str, keys: Keys, activation: str, bias: bool, model_type: str) -> tuple[ExpertsSpec, list[Part]]:
    into = "gate_up_proj" if activation == "silu" else "up_proj"
    weights = {key.projection: (key, header) for key, header in keys if key.tensor == "weight"}
    scales = {key.projection: header for key, header in keys if key.tensor in ("weight_scale", MX_SCALE)}
    turned = {}
    sizes = {}
    for projection in (into, "down_proj"):
        if projection not in weights or projection not in scales:
            raise CheckpointError(f"{name}: {projection} or its block scales are missing; all experts need both")
        key, header = weights[projection]
        experts, n, k, turned[projection] = _fused_size(key, header, scales[projection])
        sizes[projection] = (experts, n, k)
    experts, rows, hidden = sizes[into]
    intermediate = rows // 2 if activation == "silu" else rows
    header = weights["down_proj"][1]
    need(sizes["down_proj"] == (experts, hidden, intermediate), header, f"for [experts, out, in] = "
         f"{list(sizes['down_proj'])}", f"{[experts, hidden, intermediate]} beside {into}")  # fmt: skip
    spec = ExpertsSpec(experts, hidden, intermediate, activation, bias, name)
    parts = []
    for key, header in keys:
        interleaved = key.blocks or model_type.startswith("gpt_oss")
        for projection, cut in _cuts(key.projection, interleaved, spec, activation):
            _need_fused_shape(key, header, spec, turned[key.projection])
            parts += [
                Part(e, projection, key.tensor, header, key.encode, e, turned[key.projection], cut)
                for e in range(experts)
            ]
    return spec, parts


def _fused_size(key: ExpertKey, weight: Header, scale: Header) -> tuple[int, int, int, bool]:
    """(experts, N, K, stored [in, out]) of a tensor of all experts; the block scales tell which size is K."""
    if key.blocks and len(weight.shape) == 4 and weight.shape[3] == 16:
        experts, n, blocks = weight.shape[:3]
        return experts, n, 32 * blocks, False
    if len(weight.shape) == len(scale.shape) == 3:
        (experts, a, b), (_, c, d) = weight.shape, scale.shape
        if a == 8 * c and b == d:
            return experts, b, 2 * a, True
        if a == c and b == 8 * d:
            return experts, a, 2 * b, False
    raise CheckpointError(
        f"{weight.source} {weight.shape} and {scale.source} {scale.shape} do not belong together; need [experts, N, "
        "K/2] with [experts, N, K/16], or both with the last two sizes exchanged, or MXFP4 [experts, N, K/32, 16]"
    )


def _cuts(projection: str, interleaved: bool, spec: ExpertsSpec, activation: str) -> list[tuple[str, slice | None]]:
    if projection != "gate_up_proj":
        return [(_slot_name(projection, activation), None)]
    rows = spec.intermediate_size
    if interleaved:
        return [("gate_proj", slice(0, None, 2)), ("up_proj", slice(1, None, 2))]
    return [("gate_proj", slice(0, rows)), ("up_proj", slice(rows, None))]


def _need_fused_shape(key: ExpertKey, header: Header, spec: ExpertsSpec, turned: bool) -> None:
    e, shape = spec.num_experts, header.shape
    if key.tensor in SCALARS:
        need(shape in ((), (1,), (e,), (e, 1)), header, f"{header.dtype} {shape}", f"(), (1,), ({e},) or ({e}, 1)")
        return
    projection = "down_proj" if key.projection == "down_proj" else "gate_proj"
    n, k = spec.shape(projection)
    n *= 2 if key.projection == "gate_up_proj" else 1
    wanted = {
        "weight": (n, k // 32, 16) if key.blocks else (n, k // 2),
        "weight_scale": (n, k // 16),
        MX_SCALE: (n, k // 32),
        "bias": (n,),
    }[key.tensor]
    wanted = (e, *(reversed(wanted) if turned and len(wanted) == 2 else wanted))
    need(shape == wanted, header, f"{header.dtype} {shape}", f"{wanted} for this layer's sizes")
