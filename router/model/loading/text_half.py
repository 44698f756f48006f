"""The text half of a wrapper: a model of transformers that joins a text model with a vision or an audio tower.

transformers' class of the wrapper computes every text, as it does by itself. What no text needs (a tower, a
projector) is found by a run of the whole wrapper over a text on the meta device, which takes no memory. An
empty module then stands in its place, and its weights are neither read nor held.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    AutoModel,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from lightkv.errors import UnsupportedModel
from lightkv.integrations.model.adapters.selected_logits import select_logits
from lightkv.integrations.model.probe import find_shape


class LeftOut(nn.Module):
    """Stands in the place of a module that is left out: it has no weights and computes nothing."""

    device = torch.device("meta")  # some wrappers look at a tower's before they look for an image

    def __init__(self, config: PreTrainedConfig | None = None) -> None:
        """`config`: that of the module, which some wrappers read."""
        super().__init__()
        self.config = config


@dataclass(frozen=True)
class TextHalf:
    """How to load the text half of a wrapper.

    Attributes:
        model_class: a subclass of the wrapper's class whose models lack what is left out. It has `from_config`
            and `from_pretrained`, as an auto class of transformers has.
        left_out: the names of the wrapper's modules that no text needs.
    """

    model_class: Any
    left_out: tuple[str, ...]
    _whole: PreTrainedModel  # on the meta device

    def places(self, stored: Iterable[str]) -> dict[str, str]:
        """Returns, for each name of a stored tensor that belongs to a module left out, the module's name."""
        found = {}
        base = self._whole.base_model_prefix
        for name, renamed in sorted(stored_names(self._whole, stored).items()):
            for module in self.left_out:
                if renamed.startswith((f"{module}.", f"{module.removeprefix(f'{base}.')}.")):
                    found[name] = module
        return found


def stored_names(model: PreTrainedModel, stored: Iterable[str]) -> dict[str, str]:
    """Returns the names in a `model` that transformers finds for those of stored tensors."""
    conversions = get_model_conversion_mapping(model)
    renamings = [one for one in conversions if isinstance(one, WeightRenaming)]
    converters = [one for one in conversions if isinstance(one, WeightConverter)]
    base, state = model.base_model_prefix, cast(nn.Module, model).state_dict()
    return {name: rename_source_key(name, renamings, converters, base, state)[0] for name in stored}


def is_wrapper(config: PreTrainedConfig) -> bool:
    """Returns whether a model of this configuration joins a text model with other modalities."""
    names = getattr(config, "sub_configs", {})
    has_other = "text_config" in names or any("vision" in name or "audio" in name for name in names)
    return has_other or type(config) in MODEL_FOR_MULTIMODAL_LM_MAPPING


def wrapper_class(config: PreTrainedConfig) -> Any:
    """Returns transformers' class of a wrapper that generates text, None if it has none."""
    for mapping in (MODEL_FOR_MULTIMODAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING):
        if type(config) in mapping:
            return mapping[type(config)]
    return None


def text_half(config: PreTrainedConfig) -> TextHalf:
    """Returns how to load the text half of the wrapper of this configuration.

    The whole wrapper is built on the meta device. Raises UnsupportedModel, and what the wrapper's class raises.
    """
    wrapper = wrapper_class(config)
    with torch.device("meta"):
        # In bfloat16: on the meta device, products over experts exist in 16 bits only. Some towers have no
        # attention but eager, which is what the run over a text has to restore.
        whole = _without(wrapper, ()).from_config(config, dtype=torch.bfloat16, attn_implementation="eager")
    left_out = _unused_by_text(whole)
    return TextHalf(_without(wrapper, left_out), left_out, whole)


def note_left_out(model: PreTrainedModel, num_bytes: Mapping[str, int]) -> None:
    """Keeps what is left out of a loaded `model`, for `left_out_of`: the bytes of each module, by its name."""
    vars(model)["lightkv_left_out"] = dict(num_bytes)


def left_out_of(model: PreTrainedModel) -> dict[str, int]:
    """Returns the modules left out of `model`, each with the bytes that its weights would take as loaded."""
    return dict(vars(model).get("lightkv_left_out", {}))


def _without(wrapper: Any, left_out: tuple[str, ...]) -> Any:
    """Returns a subclass of the class `wrapper` whose models lack the modules `left_out`. It has the wrapper's
    name and module, by which transformers finds what to do with the names of stored weights."""

    def init(self: PreTrainedModel, config: PreTrainedConfig) -> None:
        with _without_missing_packages():
            wrapper.__init__(self, _causal(config))
        for name in left_out:
            self.set_submodule(name, LeftOut(getattr(self.get_submodule(name), "config", None)))
        begins = tuple(f"{name}." for name in left_out)
        self.all_tied_weights_keys = {
            key: target for key, target in self.all_tied_weights_keys.items() if not key.startswith(begins)
        }
        if self._tp_plan:
            self._tp_plan = {key: how for key, how in self._tp_plan.items() if not key.startswith(begins)}

    def from_config(cls: Any, config: PreTrainedConfig, **arguments: Any) -> Any:
        return cls._from_config(copy.deepcopy(config), **arguments)  # which writes into it

    body = {"__init__": init, "__module__": wrapper.__module__, "from_config": classmethod(from_config)}
    return type(wrapper.__name__, (wrapper,), body)


def _causal(config: PreTrainedConfig) -> PreTrainedConfig:
    """Returns a configuration without the attention in both directions that only tokens of images have."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    if getattr(text, "use_bidirectional_attention", None) == "vision":
        text.use_bidirectional_attention = None
    return config


@contextmanager
def _without_missing_packages() -> Iterator[None]:
    """Puts a LeftOut in the place of a tower that needs a package which is not installed (timm)."""
    auto: Any = AutoModel
    before, own = vars(auto)["from_config"], auto.from_config

    def from_config(config: PreTrainedConfig, **arguments: Any) -> Any:
        try:
            return own(config, **arguments)
        except ImportError:
            return LeftOut(config)

    auto.from_config = from_config
    try:
        yield
    finally:
        auto.from_config = before


def _unused_by_text(whole: PreTrainedModel) -> tuple[str, ...]:
    """Returns the names of the modules that do nothing when the wrapper, on the meta device, reads a text."""
    candidates = list(_outside_text(whole))
    called = set[nn.Module]()

    def note(module: nn.Module, *_: Any) -> None:
        called.add(module)

    handles = [part.register_forward_pre_hook(note) for _, module in candidates for part in module.modules()]
    try:
        # A wrapper that cannot run is refused where its text half is probed.
        with suppress(UnsupportedModel):
            select_logits(whole)
            find_shape(whole)
    finally:
        for handle in handles:
            handle.remove()

    def unused(name: str, module: nn.Module) -> Iterator[str]:
        if called.isdisjoint(module.modules()):
            yield name
            return
        for own, child in module.named_children():
            if _has_model(child):
                yield from unused(f"{name}.{own}", child)

    return tuple(name for candidate in candidates for name in unused(*candidate))


def _outside_text(whole: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    """Yields the modules with weights that are no part of the text model or the head, with their names."""
    try:
        embeddings, head = whole.get_input_embeddings(), whole.get_output_embeddings()
    except NotImplementedError as error:
        reason = "transformers does not say where its text's embeddings are (get_input_embeddings)"
        raise UnsupportedModel(type(whole).__name__, reason) from error
    # The text model is the innermost model that has the embeddings.
    text = [
        module
        for module in cast(nn.Module, whole).modules()
        if isinstance(module, PreTrainedModel) and embeddings in set(module.modules())
    ][-1]
    needed = {embeddings, head, text}

    def visit(module: nn.Module, begin: str) -> Iterator[tuple[str, nn.Module]]:
        for own, child in module.named_children():
            parts = set(child.modules())
            if child not in needed and needed & parts:
                yield from visit(child, f"{begin}{own}.")
            elif child is text:
                yield from in_text(f"{begin}{own}.")
            elif child not in needed and (list(child.parameters()) or isinstance(child, LeftOut)):
                yield f"{begin}{own}", child

    def in_text(begin: str) -> Iterator[tuple[str, nn.Module]]:
        for own, child in text.named_children():
            if needed.isdisjoint(child.modules()) and _has_model(child):
                yield f"{begin}{own}", child

    yield from in_text("") if text is whole else visit(cast(nn.Module, whole), "")


def _has_model(module: nn.Module) -> bool:
    return any(isinstance(part, PreTrainedModel) for part in module.modules())
