"""The attention calls of a Hugging Face model: what one holds, which object computes it, and the forward pass.

compute(model, …, handler)
  └─ every layer's attention module
       └─ _attention (transformers' interface)   or   the fused forward pass (fused_rotary.py)
            └─ handler.attend(AttentionCall)
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol, cast

import torch
from transformers import AttentionInterface, PreTrainedModel

from lightkv.attention import RotaryEmbedding
from lightkv.errors import LightKVError, UnsupportedModel

# The name of lightkv's attention function. No mask function has this name, so transformers builds no mask.
ATTENTION = "lightkv"


class AttentionCall(NamedTuple):
    """One call of attention, made by one layer in one forward pass over `T` packed tokens.

    `arguments` holds what the module passes to its attention function by name, such as the scale and the
    window; it is empty when the fused forward pass makes the call.
    """

    module: Any  # the attention module, a torch.nn.Module with a layer_idx
    q: torch.Tensor  # [1, heads, T, k_dim]
    k: torch.Tensor  # [1, kv_heads, T, k_dim]
    v: torch.Tensor  # [1, kv_heads, T, v_dim]
    mask: Any
    arguments: dict[str, Any]
    rotary: RotaryEmbedding | None  # still to be applied to q and k; None if they have their positions

    @property
    def output_shape(self) -> tuple[int, int, int, int]:
        """The shape of the attention output, `(1, T, heads, v_dim)`."""
        return self.q.shape[0], self.q.shape[2], self.q.shape[1], self.v.shape[-1]

    def rotated(self) -> "AttentionCall":
        """Returns the call with norms and positions applied to q and k, which are changed in place."""
        if self.rotary is None:
            return self
        self.rotary.apply(self.q[0].transpose(0, 1), self.k[0].transpose(0, 1))
        return self._replace(rotary=None)


class AttentionHandler(Protocol):
    """Computes the attention calls of a forward pass."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Returns the attention output, `[1, T, heads, v_dim]`.

        A handler has to apply `call.rotary` where it is not None; `call.rotated()` does so. It may change q
        and k in place.
        """


class KeptHandler:
    """The forward pass of an adapted model, which keeps the handler of a call for its attention modules.

    Its layers do not hand keyword arguments on, so the modules read `handler` here. A call without a handler is
    the model's own forward pass.
    """

    def __init__(self, model: PreTrainedModel, owns_attention: bool, mask: torch.Tensor | None) -> None:
        """Keeps the handler of one `model`.

        owns_attention: its modules compute their scores themselves, and get no mask under `compute`.
        mask: what the model is given as its attention mask under `compute`; None for nothing.
        """
        self.model = model
        self.owns_attention = owns_attention
        self.handler: AttentionHandler | None = None
        self._mask = mask
        self._names = inspect.signature(type(model).forward).parameters.keys()

    def __call__(self, *args: Any, lightkv: AttentionHandler | None = None, **kwargs: Any) -> Any:
        """Runs the model's own forward pass, with `lightkv` kept while it runs. Arguments that it does not name
        are left out then: some models take no positions."""
        if lightkv is None:
            return type(self.model).forward(self.model, *args, **kwargs)
        arguments = {name: value for name, value in kwargs.items() if name in self._names}
        if self._mask is not None:
            arguments["attention_mask"] = self._mask
        return self.run(lightkv, partial(type(self.model).forward, self.model), *args, **arguments)

    def run(self, handler: AttentionHandler, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Returns `forward(*args, **kwargs)`, a forward pass of the model or of a part, with `handler` kept."""
        config = self.model.config
        before = config._attn_implementation
        if self.owns_attention:
            config._attn_implementation = ATTENTION  # so no mask is made
        self.handler = handler
        try:
            return forward(*args, **kwargs)
        finally:
            self.handler = None
            config._attn_implementation = before


def kept_handler(model: PreTrainedModel) -> KeptHandler | None:
    """Returns the forward pass of an adapted model; None for any other model."""
    forward = vars(model).get("forward")
    return forward if isinstance(forward, KeptHandler) else None


def switch_attention(model: PreTrainedModel, name: str) -> None:
    """Makes `model` call lightkv's attention function, which is registered under `name`, instead of its own.

    An adapted model whose modules compute their scores themselves has nothing to switch. Raises
    UnsupportedModel, with nothing switched, for another model that does not look its attention up by name.
    """
    if (kept := kept_handler(model)) is not None and kept.owns_attention:
        return
    AttentionInterface.register(name, _attention)
    before = model.config._attn_implementation
    set_attention(model, name)
    if model.config.get_text_config()._attn_implementation != name:
        set_attention(model, before)
        raise UnsupportedModel(type(model).__name__, "it does not use transformers' AttentionInterface")


def set_attention(model: PreTrainedModel, name: str) -> None:
    """Makes the modules of `model` call the attention function `name`.

    The configuration of a tower that is left out stays as it is: transformers would warn that no module has it.
    """
    config = model.config
    parts = [part for part in cast(torch.nn.Module, model).modules() if isinstance(part, PreTrainedModel)]
    held = {id(part.config) for part in parts} | {id(config.get_text_config())}
    names = [key for key in config.sub_configs if getattr(config, key, None) is not None]
    of_parts = [key for key in names if id(getattr(config, key)) in held]
    model.set_attn_implementation(name if of_parts == names else {"": name, **dict.fromkeys(of_parts, name)})


def compute(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
    handler: AttentionHandler,
    logits_index: torch.Tensor | None,
) -> torch.Tensor:
    """Runs a forward pass of a bound model over packed tokens; `handler` computes its attention.

    `input_ids` and `position_ids` are int64 `[T]`. `logits_index`, int64 `[n]`, selects the tokens whose
    logits are computed; None selects all. Returns the logits, `[n, vocabulary]`, in the model's dtype.
    """
    output = model(
        input_ids=input_ids[None],
        position_ids=position_ids[None],
        use_cache=False,
        logits_to_keep=0 if logits_index is None else logits_index,  # 0 keeps all
        lightkv=handler,
    )
    return cast(torch.Tensor, output.logits[0])


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    *,
    lightkv: AttentionHandler | None = None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers calls. `lightkv` is an argument of the model's forward pass."""
    if lightkv is None:  # or a bound model was called without `compute`
        raise LightKVError(
            "its attention is called without the argument `lightkv`: its layers do not hand keyword arguments "
            "on"
        )
    call = AttentionCall(module, query, key, value, attention_mask, arguments, None)
    return lightkv.attend(call), None
