"""Where a name of a checkpoint is in a transformers model, and what its experts compute."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace
from typing import Any

from torch import Tensor

from nvfp4 import ExpertsSpec

from .errors import CheckpointError
from .names import with_and_without_model
from .on_input import ON_INPUT

_ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "relu2": "relu2",
}  # fmt: skip


class Places:
    """Names of one model: as they are, with or without "model.", and through transformers' own renamings."""

    def __init__(self, model: Any) -> None:
        """Collect modules, parameters and buffers."""
        self.model = model
        self.modules = {name for name, _ in model.named_modules()}
        self.slots: dict[str, Tensor] = dict(model.named_parameters()) | dict(model.named_buffers())
        self._renamings = _renamings(model.config.model_type)

    def module(self, name: str) -> str:
        """The module that a checkpoint calls ``name``.

        Raises:
            CheckpointError: there is none.
        """
        found = self._first(f"{name}.", {f"{m}." for m in self.modules})
        if found is None:
            raise CheckpointError(f"{name} is no module of {type(self.model).__name__}")
        return found[:-1]

    def slot(self, key: str) -> str | None:
        """The parameter or buffer that a checkpoint calls ``key``, or None."""
        return self._first(key, self.slots.keys())

    def ignored(self, key: str) -> bool:
        """Whether the model's class does without this key: layers that predict a second token, for instance."""
        patterns = getattr(self.model, "_keys_to_ignore_on_load_unexpected", None) or ()
        return any(re.search(p, name) for p in patterns for name in with_and_without_model(key))

    def _first(self, name: str, known) -> str | None:
        renamed = name
        for rule in self._renamings:
            renamed = rule.rename_source_key(renamed)[0]
        candidates = (*with_and_without_model(name), *with_and_without_model(renamed))
        return next((candidate for candidate in candidates if candidate in known), None)


def _renamings(model_type: str) -> list:
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    return [r for r in get_checkpoint_conversion_mapping(model_type) or () if isinstance(r, WeightRenaming)]


def experts_spec(spec: ExpertsSpec, name: str, module: Any, config: Any) -> ExpertsSpec:
    """The spec of a layer on disk with the name and the activation of the module whose place it takes.

    Raises:
        CheckpointError: the module computes something that is not known here, or has other sizes.
    """
    config = config.get_text_config(decoder=True)
    down = getattr(module, "down_proj", None)
    act = getattr(config, "mlp_hidden_act" if spec.activation == "relu2" else "hidden_act", None)
    activation = _ACTIVATIONS.get(str(act))
    alpha, limit = getattr(module, "alpha", None), getattr(module, "limit", None)
    gate = getattr(getattr(type(module), "_apply_gate", None), "__name__", "_default_apply_gate")
    known = (
        isinstance(down, Tensor)
        and down.dim() == 3
        and activation is not None
        and (activation == "relu2") == (spec.activation == "relu2")
        and (len(inspect.signature(module.forward).parameters) == 3 or type(module).__name__ in ON_INPUT)
        and (limit is not None or (alpha is None and gate == "_default_apply_gate"))
        and not getattr(module, "has_post_expert_norm", False)
    )
    if not known:
        raise CheckpointError(
            f"{name} is {type(module).__name__}, activation {act!r}; known are experts called with (states, ids, "
            f"weights), one down_proj of three sizes, and {', '.join(_ACTIVATIONS)}, with or without limit"
        )
    assert down is not None
    sizes = (spec.num_experts, *sorted((spec.hidden_size, spec.intermediate_size)))
    if (down.shape[0], *sorted(down.shape[1:])) != sizes:
        raise CheckpointError(
            f"{name}: config.json says down_proj {tuple(down.shape)}, but the files hold {spec.num_experts} experts of "
            f"hidden size {spec.hidden_size} and intermediate size {spec.intermediate_size}"
        )
    if hasattr(module, "down_proj_bias") != spec.bias:
        raise CheckpointError(f"{name}: biases are in {'the files' if spec.bias else 'the model'} only")
    bound = None if limit is None else float(limit)
    if alpha is not None:
        return replace(spec, layer=name, activation="swigluoai", alpha=float(alpha), beta=1.0, limit=bound)
    return replace(spec, layer=name, activation=str(activation), limit=bound)
