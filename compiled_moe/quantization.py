"""How a checkpoint says that it is quantised: one reading of the configuration files of every producer."""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from .errors import CheckpointError

_MODELOPT = ("NVFP4", "W4A16_NVFP4", "MIXED_PRECISION")
KNOWN = (
    "quant_method 'modelopt' with quant_algo NVFP4, W4A16_NVFP4 or MIXED_PRECISION; 'compressed-tensors' with format "
    "nvfp4-pack-quantized; 'mxfp4'; 'fp8' with expert_dtype 'fp4'"
)
_AWQ = (
    "NVFP4_AWQ, whose pre_quant_scale divides the activations; leaving it out would be silently wrong, and it is not "
    "applied here: export with NVFP4 instead"
)


@dataclass(frozen=True)
class Quantization:
    """What the configuration claims; the tensors have the last word.

    Attributes:
        method: "modelopt", "compressed-tensors", "mxfp4" or "fp8" (DeepSeek-V4, whose experts are MXFP4).
        algorithm: NVFP4, W4A16_NVFP4, MIXED_PRECISION or MXFP4.
        weight_only: the checkpoint claims no activation scales.
        ignore: modules left as they were: names, globs, or regular expressions after "re:".
        layers: module to algorithm, for MIXED_PRECISION.
    """

    method: str
    algorithm: str
    weight_only: bool = False
    ignore: tuple[str, ...] = ()
    layers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, config: dict, separate: dict | None, where: str) -> Quantization:
        """Read ``quantization_config`` of config.json, or hf_quant_config.json where that is missing.

        Args:
            config: config.json. separate: hf_quant_config.json, if there is one. where: for messages.

        Raises:
            CheckpointError: not quantised, or in a way that is not known here.
        """
        said = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")
        if not said and separate is not None:
            said = separate.get("quantization")
        if not isinstance(said, dict):
            raise CheckpointError(
                f"{where} is not quantised: config.json has no quantization_config; this loads {KNOWN}"
            )
        method = said.get("quant_method", "modelopt" if "quant_algo" in said else None)
        if method == "modelopt":
            return _modelopt(said, separate, where)
        if method == "compressed-tensors":
            return _compressed_tensors(said, where)
        if method == "mxfp4":
            return cls("mxfp4", "MXFP4", True, _names(said, "modules_to_not_convert", where))
        if method == "fp8" and config.get("expert_dtype") == "fp4":
            return cls("fp8", "MXFP4", True, _names(said, "modules_to_not_convert", where))
        raise _unknown(said, where)

    def ignores(self, module: str) -> bool:
        """Whether the configuration says that this module was not quantised."""
        names = {module, module.removeprefix("model."), f"model.{module}"}
        return any(_matches(pattern, names) for pattern in self.ignore)

    def of(self, module: str) -> str | None:
        """Algorithm of a module; None where the configuration does not quantise it."""
        if self.ignores(module):
            return None
        if self.algorithm != "MIXED_PRECISION":
            return self.algorithm
        for name in (module, f"model.{module}", module.removeprefix("model.")):
            if name in self.layers:
                return self.layers[name]
        return None


def _modelopt(said: dict, separate: dict | None, where: str) -> Quantization:
    algorithm = said.get("quant_algo")
    if isinstance(algorithm, str) and algorithm.endswith("NVFP4_AWQ"):
        raise CheckpointError(f"{where} is quantised with {_AWQ}")
    if algorithm not in _MODELOPT:
        raise _unknown(said, where)
    key = "ignore" if "ignore" in said else "exclude_modules"
    layers: dict[str, str] = {}
    if algorithm == "MIXED_PRECISION":
        listed = said.get("quantized_layers")
        if listed is None and separate is not None:
            listed = (separate.get("quantization") or {}).get("quantized_layers")
        if not isinstance(listed, dict) or not all(isinstance(v, dict) for v in listed.values()):
            raise CheckpointError(
                f"{where} says MIXED_PRECISION, but quantized_layers, which lists the algorithm of each layer, is "
                "missing or no object; take hf_quant_config.json from the producer"
            )
        layers = {name: str(value.get("quant_algo")) for name, value in listed.items()}
        awq = [name for name, layer in layers.items() if layer.endswith("NVFP4_AWQ")]
        if awq:
            raise CheckpointError(f"{where}: {awq[0]} is quantised with {_AWQ}")
    group = said.get("group_size", 16)
    if group != 16 and algorithm != "MIXED_PRECISION":
        raise CheckpointError(f"{where} says group_size {group!r}; NVFP4 has one block scale for 16 codes")
    return Quantization("modelopt", str(algorithm), algorithm == "W4A16_NVFP4", _names(said, key, where), layers)


def _compressed_tensors(said: dict, where: str) -> Quantization:
    groups = said.get("config_groups")
    if not isinstance(groups, dict) or not groups or not all(isinstance(g, dict) for g in groups.values()):
        raise CheckpointError(f"{where}: quant_method 'compressed-tensors' needs config_groups, an object of objects")
    weight_only = True
    for name, group in groups.items():
        form = group.get("format") or said.get("format")
        weights = group.get("weights") or {}
        shape = tuple(weights.get(k) for k in ("num_bits", "type", "group_size")) if isinstance(weights, dict) else ()
        if form != "nvfp4-pack-quantized" or shape != (4, "float", 16):
            raise CheckpointError(
                f"{where}: group {name!r} has format {form!r} with (num_bits, type, group_size) = {shape}; this loads "
                "nvfp4-pack-quantized with (4, 'float', 16)"
            )
        weight_only &= group.get("input_activations") is None
    algorithm = "W4A16_NVFP4" if weight_only else "NVFP4"
    return Quantization("compressed-tensors", algorithm, weight_only, _names(said, "ignore", where))


def _unknown(said: dict, where: str) -> CheckpointError:
    method, algorithm = said.get("quant_method", "?"), said.get("quant_algo")
    return CheckpointError(
        f"{where} is quantised with quant_method {method!r}, quant_algo {algorithm!r}; this loads {KNOWN}"
    )


def _names(said: dict, key: str, where: str) -> tuple[str, ...]:
    names = said.get(key) or []
    if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
        raise CheckpointError(f"{where}: {key} must be a list of names, globs and 're:' expressions")
    for name in names:
        if name.startswith("re:"):
            _compiled(name, where)
    return tuple(names)


@functools.lru_cache(maxsize=256)
def _compiled(pattern: str, where: str = "") -> re.Pattern[str]:
    try:
        return re.compile(pattern[3:] if pattern.startswith("re:") else fnmatch.translate(pattern))
    except (re.error, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{where}: {pattern!r} in the ignore list is no regular expression: {error}") from error


def _matches(pattern: str, names: set[str]) -> bool:
    return any(_compiled(pattern).match(name) is not None for name in names)
