"""Makes models run whose layers do not hand keyword arguments on, or whose attention computes its own scores.

A model is known by the name of its class here, since its attention modules have to be called in their own way.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lightkv.integrations.model.attention_call import KeptHandler, kept_handler

from . import families
from .families import ModuleCall
from .selected_logits import select_logits


@dataclass(frozen=True)
class Family:
    """How the attention of a family of models is adapted.

    `module`: the class of the attention modules. `attend`: computes one of their calls; None where the module
    calls AttentionInterface, and only has to be given the handler. `slopes`: returns those of a model's bias by
    distance; None for a family without one. `needs_mask`: whether the model's forward pass fails without an
    attention mask. `returned`: what a module returns with the output that `attend` returned. `marker`: an
    attribute of the modules that have to be adapted, for a family that is changed in later releases of
    transformers.
    """

    module: str
    attend: Callable[[ModuleCall], Tensor] | None = None
    slopes: Callable[[Any], Tensor | None] | None = None
    needs_mask: bool = False
    returned: Callable[[Any, Tensor], Any] = lambda module, output: (output, None)
    marker: str | None = None


FAMILIES = {
    "BigBirdForCausalLM": Family("BigBirdSelfAttention", families.bert),
    "BloomForCausalLM": Family("BloomAttention", families.bloom, families.bloom_slopes),
    # From transformers 5.24 on these two call AttentionInterface, and the table is another module's.
    "CodeGenForCausalLM": Family("CodeGenAttention", families.codegen, marker="embed_positions"),
    "GPTJForCausalLM": Family("GPTJAttention", families.gpt_j, marker="embed_positions"),
    "DiffLlamaForCausalLM": Family("DiffLlamaAttention", families.diff_llama),
    "FalconForCausalLM": Family("FalconAttention", families.falcon, families.falcon_slopes),
    "GPTNeoForCausalLM": Family("GPTNeoAttention", families.gpt_neo),
    "GPTNeoXJapaneseForCausalLM": Family(
        "GPTNeoXJapaneseAttention",
        families.gpt_neox_japanese,
        returned=lambda module, output: (output, None, module.dense_bias),
    ),
    "MegatronBertForCausalLM": Family("MegatronBertSelfAttention", families.bert),
    "MptForCausalLM": Family("MptAttention", families.mpt, families.mpt_slopes, needs_mask=True),
    "MvpForCausalLM": Family("MvpAttention", families.bart),
    "NemotronForCausalLM": Family("NemotronAttention"),
    "OpenAIGPTLMHeadModel": Family(
        "Attention", families.openai_gpt, returned=lambda module, output: [output]
    ),
    "RemBertForCausalLM": Family("RemBertSelfAttention", families.bert),
    "RoFormerForCausalLM": Family("RoFormerSelfAttention", families.bert),
    "StableLmForCausalLM": Family("StableLmAttention"),
    "XGLMForCausalLM": Family("XGLMAttention", families.bart),
}


def adapt(model: PreTrainedModel) -> int:
    """Makes `model` run under `compute` if it is of one of `FAMILIES`; leaves any other model as it is.

    Returns how many attention modules were changed; 0 for a model that needs no change. Called in another
    way than by `compute`, the model computes what it did before. This is for models that the engine loaded: it
    replaces forward passes of their modules, and sets `layer_idx` of modules that lack it.
    """
    if type(model).__name__ == "Zamba2ForCausalLM":  # whose blocks are told their layer in each call
        for idx, layer in enumerate(model.model.layers):
            if hasattr(layer, "shared_transformer"):
                layer.shared_transformer.self_attn.layer_idx = idx
    select_logits(model)
    family = FAMILIES.get(type(model).__name__)
    if family is None or kept_handler(model) is not None or not (modules := adapted_modules(model)):
        return 0
    slopes = None if family.slopes is None else family.slopes(model)
    mask = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=model.device) if family.needs_mask else None
    kept = KeptHandler(model, family.attend is not None, mask)
    for idx, module in enumerate(modules):
        if family.attend is None:
            module.register_forward_pre_hook(partial(_give_handler, kept), with_kwargs=True)
            continue
        if not hasattr(module, "layer_idx"):
            module.layer_idx = idx
        module.forward = partial(_attention_forward, module, family, slopes, kept)
    # A step may have more tokens than a text has positions.
    table: Any
    for table in model.modules():
        if hasattr(table, "make_weights"):  # XGLM's positions
            table.make_weights = partial(_grow_table, table, kept)
        if "token_type_ids" in table._buffers:  # BigBird's, which are 0; without them it makes some itself
            del table.token_type_ids
    model.forward = kept
    return len(modules)


def adapted_modules(model: PreTrainedModel) -> list[Any]:
    """Returns the attention modules of a model of one of `FAMILIES` that have to be adapted, in the order of
    layers."""
    family = FAMILIES[type(model).__name__]
    found = [module for module in model.modules() if type(module).__name__ == family.module]
    return [module for module in found if family.marker is None or hasattr(module, family.marker)]


def _give_handler(
    kept: KeptHandler, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """A hook before the forward pass of an attention module that gives it the handler of the model's call."""
    return None if kept.handler is None else (args, {"lightkv": kept.handler, **kwargs})


def _grow_table(table: Any, kept: KeptHandler, *args: Any) -> None:
    """Grows a table of positions for a longer text, but not in a call of `compute`: CUDA graphs read it where
    it is."""
    if kept.handler is None:
        type(table).make_weights(table, *args)


def _attention_forward(
    module: Any,
    family: Family,
    slopes: Tensor | None,
    kept: KeptHandler,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """The forward pass of an attention module: that of its family in a call of `compute`; else its own."""
    if kept.handler is None or family.attend is None:
        return type(module).forward(module, *args, **kwargs)
    output = family.attend(ModuleCall(module, kept.handler, slopes, args, kwargs))
    return family.returned(module, output)
