"""A Hugging Face causal LM on lightkv's attention: what its layers are, and a packed forward pass.

Knows transformers' AttentionInterface and no model by name: what a layer's attention is, is taken from the
call that the model makes of it. Knows no sequence, no sampling and no loading of weights.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from ..attention import AttentionBackend, AttentionMetadata, AttentionOptions, LayerShape, RotaryEmbedding
from ..errors import UnsupportedModel
from ..kv_spec import KVSpec
from .fused_rotary import fuse, fused_forwards, set_fused_forwards

ATTENTION = "lightkv"  # under this name in AttentionInterface; without a mask, so that none is computed
PROBE = "lightkv_probe"  # the same function, with a mask that says what the model would have masked

# Arguments of an attention call that change nothing here: dropout is off, positions are applied to q and k.
_HARMLESS = frozenset({"dropout", "position_ids", "cache_position", "use_cache"})
_FORWARD_ARGUMENTS = frozenset({"position_ids", "logits_to_keep"})  # of a model, beside input_ids
_FAR = 1 << 20  # a query position past any window or chunk, from which the probe looks at a mask


@dataclass(frozen=True)
class ModelShape:
    """What `probe` found: the K/V of one token, and every layer's attention."""

    spec: KVSpec
    layers: tuple[LayerShape, ...]


class Receiver(Protocol):
    """Takes the attention calls of one forward pass."""

    def attend(
        self,
        module: torch.nn.Module,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: Any,
        arguments: dict[str, Any],
    ) -> torch.Tensor:
        """q `[1, heads, T, k_dim]`, k and v likewise. Returns `[1, T, heads, v_dim]`."""


@dataclass(frozen=True)
class PackedStep:
    """One step of the engine: every layer's call goes to its backend. A TurningReceiver."""

    metadata: AttentionMetadata
    backends: Sequence[AttentionBackend]

    def attend(
        self,
        module: torch.nn.Module,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: Any,
        arguments: dict[str, Any],
    ) -> torch.Tensor:
        return self.turn_and_attend(module, q, k, v, None)

    def turn_and_attend(
        self,
        module: torch.nn.Module,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rotary: RotaryEmbedding | None,
    ) -> torch.Tensor:
        """`attend`, where None of `rotary` is of q and k whose positions are applied."""
        backend = self.backends[cast(int, module.layer_idx)]
        q, k, v = (heads[0].transpose(0, 1) for heads in (q, k, v))
        out = backend.forward(q, k, v, self.metadata, rotary=rotary)
        return out.view(1, len(out), backend.num_heads, -1)


@dataclass(frozen=True)
class _MaskRule:
    """What a layer gets as its mask under the probe: the rule itself, to be asked at any position."""

    visible: Any  # (batch, head, query position, key position) → bool tensor

    def sees(self, query: int, keys: list[int], device: torch.device) -> list[bool]:
        """Which `keys` a query at position `query` may attend."""
        zero = torch.zeros((), dtype=torch.int64, device=device)
        return [bool(self.visible(zero, zero, zero + query, zero + key)) for key in keys]


class _Recorder:
    """Takes the calls of the probe's forward pass, and answers with zeros: only their form matters."""

    def __init__(self, architecture: str) -> None:
        self.architecture = architecture
        self.layers: dict[int, LayerShape] = {}
        self.dtypes: set[torch.dtype] = set()

    def attend(
        self,
        module: torch.nn.Module,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: Any,
        arguments: dict[str, Any],
    ) -> torch.Tensor:
        idx = getattr(module, "layer_idx", None)
        if not isinstance(idx, int):
            raise self._unsupported(f"{type(module).__name__} does not say which layer it is")
        if idx in self.layers:
            raise self._unsupported(f"layer {idx} attends more than once")
        options = self._options(module, mask, dict(arguments), v.shape[-1], q.device)
        if k.shape[:-1] != v.shape[:-1] or k.shape[2] != q.shape[2] or q.shape[1] % k.shape[1]:
            raise self._unsupported(f"layer {idx} attends q {q.shape}, k {k.shape}, v {v.shape}")
        self.layers[idx] = LayerShape(q.shape[1], q.shape[-1], k.shape[1], options)
        self.dtypes |= {k.dtype, v.dtype}
        return q.new_zeros(q.shape[0], q.shape[2], q.shape[1], v.shape[-1])

    def _options(
        self, module: torch.nn.Module, mask: Any, arguments: dict[str, Any], v_dim: int, device: torch.device
    ) -> AttentionOptions:
        scale = arguments.pop("scaling", None)
        window = arguments.pop("sliding_window", None) or 0
        softcap = arguments.pop("softcap", None) or 0.0
        causal = arguments.pop("is_causal", None)
        if causal is None:
            causal = getattr(module, "is_causal", True)
        if not causal:
            raise self._unsupported("its attention is not causal")
        given = {name for name, value in arguments.items() if not isinstance(value, bool | None)}
        if unknown := given - _HARMLESS:
            raise self._unsupported(f"its attention takes {', '.join(sorted(unknown))}, unknown here")
        if isinstance(mask, _MaskRule):
            first = _FAR - window + 1 if window else 0
            keys = [*([first - 1] if window else []), first, (first + _FAR) // 2, _FAR, _FAR + 1]
            expected = [*([False] if window else []), True, True, True, False]
            if mask.sees(_FAR, keys, device) != expected:
                raise self._unsupported("its mask is neither causal nor the sliding window it names")
        elif mask is not None:
            raise self._unsupported("it makes an attention mask of its own")
        return AttentionOptions(scale, int(window), float(softcap), v_dim)

    def _unsupported(self, reason: str) -> UnsupportedModel:
        return UnsupportedModel(self.architecture, reason)


def probe(model: PreTrainedModel) -> ModelShape:
    """What `model` computes as attention, from a forward pass over three tokens; the model stays as it was.

    Raises UnsupportedModel for whatever lightkv would not compute exactly, and for a model that cannot be
    called as `compute` calls it.
    """
    architecture = type(model).__name__
    # By its signature: a **kwargs would swallow what the model does not know.
    if missing := _FORWARD_ARGUMENTS - inspect.signature(type(model).forward).parameters.keys():
        raise UnsupportedModel(architecture, f"its forward pass takes no {' and no '.join(sorted(missing))}")
    recorder = _Recorder(architecture)
    before = model.config._attn_implementation
    _bind(model, PROBE)
    try:
        positions = torch.arange(3, device=model.device)
        with torch.no_grad():
            output = model(
                input_ids=torch.zeros_like(positions)[None],
                position_ids=positions[None],
                use_cache=False,
                logits_to_keep=positions[::2],  # neither all nor one: a model that knows only a count fails
                lightkv=recorder,
            )
        logits_shape = tuple(output.logits.shape)
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise UnsupportedModel(architecture, f"its forward pass fails when probed ({error})") from error
    finally:
        model.set_attn_implementation(before)

    text = model.config.get_text_config()
    if logits_shape != (1, 2, text.vocab_size):
        reason = f"asked for the logits of 2 tokens of {text.vocab_size}, it returns them as {logits_shape}"
        raise UnsupportedModel(architecture, reason)
    num_layers = text.num_hidden_layers
    if sorted(recorder.layers) != list(range(num_layers)):
        reason = f"of {num_layers} layers, {len(recorder.layers)} call the attention interface"
        raise UnsupportedModel(architecture, reason)
    layers = tuple(recorder.layers[idx] for idx in range(num_layers))
    shapes = {(layer.num_kv_heads, layer.head_dim, cast(int, layer.options.v_dim)) for layer in layers}
    if len(shapes) > 1 or len(recorder.dtypes) > 1:
        reason = f"its layers' K/V differ: (KV heads, K dim, V dim) {sorted(shapes)}, {recorder.dtypes}"
        raise UnsupportedModel(architecture, reason)
    (shape,), (dtype,) = shapes, recorder.dtypes
    return ModelShape(KVSpec(num_layers, *shape, dtype), layers)


def bind(model: PreTrainedModel) -> None:
    """Switch `model` to lightkv's attention, for `compute`. Raises UnsupportedModel, with nothing switched.

    Attention modules that do no more than project, turn by positions and attend get a forward pass of our own
    (`fused_rotary`); which do, is found by running the model once over a few tokens.

    Rotary frequencies that transformers would choose by the longest position in the batch (`dynamic`,
    `longrope`) stay those of the model's original context: no sequence depends on its neighbours, and a step
    does not wait for the device. Positions beyond that context are the caller's to refuse.
    """
    with ExitStack() as stack:
        stack.callback(_undo(model))
        _bind(model, ATTENTION)
        for module in model.modules():
            kind = getattr(module, "rope_type", None)
            if isinstance(kind, dict):  # by type of layer
                setattr(module, "rope_type", {layer: _fixed(one) for layer, one in kind.items()})  # noqa: B010
            elif isinstance(kind, str):
                setattr(module, "rope_type", _fixed(kind))  # noqa: B010

        def run(positions: torch.Tensor, receiver: Receiver) -> None:
            compute(model, torch.zeros_like(positions), positions, receiver, positions[:1])

        fuse(model, ATTENTION, run)
        stack.pop_all()


@contextmanager
def bound(model: PreTrainedModel) -> Iterator[None]:
    """`bind` for as long as the block runs; then the model is as before. Raises UnsupportedModel."""
    with ExitStack() as stack:
        stack.callback(_undo(model))
        bind(model)
        yield


def _undo(model: PreTrainedModel) -> Callable[[], None]:
    """What makes `model` again what it is now, whatever `bind` has done since."""
    before = model.config._attn_implementation
    kinds = {module: module.rope_type for module in model.modules() if hasattr(module, "rope_type")}
    forwards = fused_forwards(model)

    def undo() -> None:
        model.set_attn_implementation(before)
        for module, kind in kinds.items():
            setattr(module, "rope_type", kind)  # noqa: B010
        set_fused_forwards(model, forwards)

    return undo


def _fixed(rope_type: str) -> str:
    return "default" if rope_type in ("dynamic", "longrope") else rope_type


def compute(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
    receiver: Receiver,
    logits_index: torch.Tensor | None,
) -> torch.Tensor:
    """A forward pass of a bound model over packed tokens, whose attention `receiver` computes.

    `input_ids`, `position_ids`: int64 `[num_tokens]`. `logits_index`: int64 `[n]`, the tokens whose logits are
    wanted, None for all; only these go through the head. Returns `[n, vocabulary]` in the model's type.
    """
    output = model(
        input_ids=input_ids[None],
        position_ids=position_ids[None],
        use_cache=False,
        logits_to_keep=0 if logits_index is None else logits_index,  # 0: all
        lightkv=receiver,
    )
    return cast(torch.Tensor, output.logits[0])


def forward(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    metadata: AttentionMetadata,
    backends: Sequence[AttentionBackend],
    logits_index: torch.Tensor | None,
) -> torch.Tensor:
    """`compute` of the batch that `metadata` was prepared for, `input_ids` in its order."""
    step = PackedStep(metadata, backends)
    return compute(model, input_ids, metadata.position_ids, step, logits_index)


def _bind(model: PreTrainedModel, name: str) -> None:
    AttentionInterface.register(name, _attention)
    if name == PROBE:
        AttentionMaskInterface.register(name, _mask_rule)
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    if model.config.get_text_config()._attn_implementation != name:
        model.set_attn_implementation(before)
        raise UnsupportedModel(type(model).__name__, "it does not use transformers' AttentionInterface")


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    *,
    lightkv: Receiver,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function; `lightkv` is the keyword argument given to the model's forward."""
    return lightkv.attend(module, query, key, value, attention_mask, arguments), None


def _mask_rule(*, mask_function: Any, **_: Any) -> _MaskRule:
    """transformers' mask function."""
    return _MaskRule(mask_function)
