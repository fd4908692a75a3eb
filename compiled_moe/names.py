"""What the key of an expert's tensor means: the naming families of the field, in canonical words.

* ``...experts.3.gate_proj.weight``: one key an expert, under mlp, block_sparse_moe, mixer or ffn alike;
* ``...experts.3.w1.weight``: w1, w3, w2 are gate, up, down;
* ``...experts.gate_up_proj_weight_scale``: all experts in one tensor;
* ``...experts.down_proj_blocks``: the same in OpenAI's MXFP4.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_HEAD = r"^(?P<layer>(?:.+\.)?experts)\."
_SEPARATE = re.compile(
    _HEAD + r"(?P<expert>[0-9]{1,6})\.(?P<projection>gate_proj|up_proj|down_proj|w1|w2|w3)\.(?P<suffix>[a-z0-9_]+)$"
)
_FUSED = re.compile(_HEAD + r"(?P<projection>gate_up_proj|up_proj|down_proj)(?P<suffix>_[a-z0-9_]+)?$")
_PROJECTIONS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
MX_SCALE = "mx_scale"
"""E8M0 scales of MXFP4: they become weight_scale and weight_scale_2."""
SUFFIXES = {
    "weight": ("weight", False),
    "weight_packed": ("weight", False),
    "weight_scale": ("weight_scale", False),
    "weight_scale_2": ("weight_scale_2", False),
    "weight_global_scale": ("weight_scale_2", True),
    "input_scale": ("input_scale", False),
    "input_global_scale": ("input_scale", True),
    "bias": ("bias", False),
    "scale": (MX_SCALE, False),
    "blocks": ("weight", False),
    "scales": (MX_SCALE, False),
    "pre_quant_scale": ("pre_quant_scale", False),
}
"""Last word of a key to the canonical tensor, and whether the file holds the encode factor (2688/amax) of it."""


@dataclass(frozen=True)
class ExpertKey:
    """What one key names.

    Attributes:
        layer: the experts module, such as "model.layers.0.mlp.experts".
        expert: id, or None where one tensor holds all experts.
        projection: gate_proj, up_proj, down_proj, or gate_up_proj (both, along the output rows).
        tensor: canonical name. encode: the file stores the reciprocal.
        blocks: OpenAI's layout, [experts, rows, K/32, 16] with gate and up rows interleaved.
    """

    layer: str
    expert: int | None
    projection: str
    tensor: str
    encode: bool = False
    blocks: bool = False

    @classmethod
    def parse(cls, key: str) -> ExpertKey | None:
        """None for keys that belong to no expert."""
        if "experts." not in key:
            return None
        match = _SEPARATE.match(key)
        if match is not None:
            known = SUFFIXES.get(match["suffix"])
            if known is None or match["suffix"] in ("blocks", "scales"):
                return None
            projection = _PROJECTIONS.get(match["projection"], match["projection"])
            return cls(match["layer"], int(match["expert"]), projection, *known)
        match = _FUSED.match(key)
        if match is None:
            return None
        suffix = (match["suffix"] or "_weight")[1:]
        known = SUFFIXES.get(suffix)
        if known is None or suffix == "scale":
            return None
        return cls(match["layer"], None, match["projection"], *known, blocks=suffix in ("blocks", "scales"))


def with_and_without_model(name: str) -> tuple[str, ...]:
    """A name as checkpoints write it: with or without the leading "model."."""
    return tuple(dict.fromkeys((name, f"model.{name}", name.removeprefix("model."))))
