"""transformers: ``from_pretrained`` reads NVFP4 checkpoints, and there is still one way of reading them.

transformers builds the empty model and asks its quantizer to prepare it; there ``Filler`` reads, checks and finalizes
experts and dense NVFP4 layers from the same files. transformers loads everything else, and at the end they go in.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from nvfp4 import ScaleError

from ..checkpoint import Checkpoint
from ..dense import NVFP4Linear
from ..errors import CheckpointError
from ..experts import NVFP4Experts
from ..filling import UNUSED_SUFFIXES, Filler
from ..loader import Loaded
from ..quantization import Quantization
from ..shards import Reader, read_json

METHOD = "compiled-moe"
"""The quantizer's name in transformers' table; in files the producer's own name stays."""
_AUTOMATIC = ("auto", "balanced", "balanced_low_0", "sequential")


class Rules(NamedTuple):
    """What ``nvfp4.finalize`` is asked for, and where."""

    precision: str
    policy: str
    repairs: tuple[str, ...]
    device: str | None = None


class NVFP4Checkpoint(QuantizationConfigMixin):
    """``quantization_config`` as a file says it, kept word for word, so that a saved model says it again."""

    quant_method: Any = METHOD

    def __init__(self, **said: Any) -> None:
        """Keep what was said."""
        self.said = said

    def to_dict(self) -> dict[str, Any]:
        """What the file said."""
        return copy.deepcopy(self.said)


def said_by(folder: Path) -> NVFP4Checkpoint:
    """What hf_quant_config.json says, for folders whose config.json says nothing.

    Raises:
        CheckpointError: no such file, or a quantisation that is not read here.
    """
    config = read_json(folder / "config.json", "a checkpoint folder holds config.json and *.safetensors")
    separate = read_json(folder / "hf_quant_config.json", "where config.json has no quantization_config")
    Quantization.read(config, separate, str(folder))
    return NVFP4Checkpoint(**{"quant_method": "modelopt"} | separate["quantization"])


def register(rules: Rules, methods: tuple[str, ...]) -> None:
    """Put this quantizer into transformers' tables, after taking out what an earlier call put there."""
    quantizers: dict[str, Any] = AUTO_QUANTIZER_MAPPING
    configs: dict[str, Any] = AUTO_QUANTIZATION_CONFIG_MAPPING
    for method, entry in list(configs.items()):
        if getattr(entry, "reads_nvfp4", False):
            configs |= {method: entry.stock}
            if entry.stock is None:
                del configs[method]
    quantizers[METHOD] = type("NVFP4Quantizer", (NVFP4Quantizer,), {"rules": rules})
    for method in methods:
        configs[method] = _either(configs.get(method))


def _either(stock: Any) -> type:
    """Ours for what this package reads, transformers' own (if it has one) for all else of the same method."""
    base: Any = stock or QuantizationConfigMixin

    class Either(base):
        reads_nvfp4 = True

        @classmethod
        def from_dict(cls, config_dict: dict, *args: Any, **kwargs: Any) -> Any:
            try:
                Quantization.read({"quantization_config": config_dict}, None, "config.json")
            except CheckpointError:
                if stock is None:
                    raise
                return stock.from_dict(config_dict, *args, **kwargs)
            return NVFP4Checkpoint(**config_dict)

    Either.stock = stock
    return Either


class NVFP4Quantizer(HfQuantizer):
    """Puts finalized experts and dense layers into a model that transformers loads."""

    rules = Rules("w4a16", "raise", ())
    is_trainable = False
    is_compileable = True

    def __init__(self, quantization_config: Any, **kwargs: Any) -> None:
        """Whether config.json said so or the caller, the files are quantised."""
        super().__init__(quantization_config, **kwargs | {"pre_quantized": True})

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        """Saved in the form of the checkpoint it came from."""
        return True

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: list[str] | None = None, device_map: Any = None, **kwargs: Any
    ) -> None:
        if not checkpoint_files:
            raise CheckpointError("from_pretrained was given a state_dict; NVFP4 experts are read from the files")
        checkpoint = Checkpoint.open(Path(checkpoint_files[0]).parent)
        precision, policy, repairs, device = self.rules
        device_of = _placement(device_map, device)
        checked = (precision, "report" if policy == "raise" else policy, repairs)
        with torch.device("cpu"):  # transformers builds under the meta device
            filler = Filler(model, checkpoint, device_of(""), checked, device_of)
            self.consumed = filler.quantised()
            filler.reader.close()
        if policy == "raise" and not filler.report.ok:
            raise ScaleError(filler.report)
        self.ready = {n: m for n, m in model.named_modules() if isinstance(m, NVFP4Experts | NVFP4Linear)}
        for name in self.ready:  # transformers overwrites every buffer that is in no file; so ours come afterwards
            model.set_submodule(name, nn.Module())
        model.nvfp4 = Loaded(checkpoint, precision, filler.report, filler.weights)
        model._keys_to_ignore_on_load_unexpected = set(model._keys_to_ignore_on_load_unexpected or ()) | {
            *(rf"(^|\.){re.escape(name.removeprefix('model.'))}[._]" for name in self._names(checkpoint)),
            *(re.escape(suffix) + "$" for suffix in UNUSED_SUFFIXES),
        }

    def _names(self, checkpoint: Checkpoint) -> set[str]:
        """Consumed modules, as the model and as the files call them."""
        return set(self.ready) | {x.name for x in checkpoint.layers} | {x.name for x in checkpoint.dense}

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        for name, module in self.ready.items():
            model.set_submodule(name, module)
        self.ready = {}
        return model.requires_grad_(False)  # inference only

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Tensor], dict]:
        """What transformers holds, and the quantised tensors as they lie in the files the model came from."""
        checkpoint, reader = model.nvfp4.checkpoint, Reader()
        state = dict(model.state_dict())
        for key in sorted(self.consumed, key=lambda k: (checkpoint.headers[k].file, k)):
            state[key] = reader.get(checkpoint.headers[key])
        reader.close()
        return state, {}


def _placement(device_map: Any, default: str | None = None) -> Callable[[str], torch.device]:
    """Module name to device, for what ``from_pretrained`` makes of ``device_map``."""
    if device_map is None:
        device_map = {"": default or "cpu"}
    if isinstance(device_map, str) and device_map in _AUTOMATIC:
        if torch.accelerator.device_count() > 1:
            raise CheckpointError(
                f"device_map={device_map!r} with {torch.accelerator.device_count()} devices: sizes of packed experts "
                "are not known to it; give one device, or a map from module to device"
            )
        device_map = {"": 0 if torch.accelerator.is_available() else "cpu"}
    if not isinstance(device_map, dict):
        device_map = {"": device_map}
    if "disk" in device_map.values():
        raise CheckpointError("device_map sends modules to disk; packed experts stay in memory")

    def device_of(name: str) -> torch.device:
        prefix = max((p for p in device_map if p == "" or f"{name}.".startswith(f"{p}.")), key=len, default=None)
        where = next(iter(device_map.values())) if prefix is None else device_map[prefix]
        return torch.device(where) if not isinstance(where, int) else torch.device("cuda", where)

    return device_of
