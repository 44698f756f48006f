"""Finds out how a Hugging Face model calls its attention, by running it once over a few tokens.

A model is refused, with the reason, where lightkv would not compute exactly what its calls ask for.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers import AttentionMaskInterface, Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from lightkv.attention import AttentionBackend, AttentionOptions, LayerShape
from lightkv.errors import LightKVError, UnsupportedModel
from lightkv.integrations.model.mixers.mixer import Mixer, bind_mixers
from lightkv.layer_groups import FULL, Lifetime
from lightkv.memory.kv_spec import KVHeads, KVSpec
from lightkv.triton_kernels.attention.variants import Alibi, Chunk, SinkLogits, Softcap, Window

from .attention_call import AttentionCall, switch_attention
from .context import cache_name, num_layers
from .hf_model import fix_rotary, undo_binding
from .token_positions import fix_positions

# The name under which lightkv's attention function gets a mask, which holds the model's own rule (_MaskRule).
PROBE = "lightkv_probe"

# Arguments of attention that change nothing here: dropout is off, positions are applied to q and k already, and
# logits_to_keep is the model's own argument, which some wrappers hand on to all their layers.
_HARMLESS = frozenset({"dropout", "position_ids", "cache_position", "use_cache", "logits_to_keep"})
_MLP_LAYERS = ("mlp", "moe")  # the types of layers that mix no tokens
_FAR = 1 << 20  # the query position at which masks are examined, which is past any window or chunk


@dataclass(frozen=True)
class ModelShape:
    """The K/V of one token of a model, and the attention of every layer.

    `numbers`: those in the model of the layers that attend, where others keep a state; None where all attend.
    """

    spec: KVSpec
    layers: tuple[LayerShape, ...]
    numbers: tuple[int, ...] | None = None

    def by_layer(self, backends: Sequence[AttentionBackend]) -> dict[int, AttentionBackend]:
        """Returns the backends of the layers that attend, by their numbers in the model."""
        return dict(zip(self.numbers or range(len(backends)), backends, strict=True))

    @property
    def lifetimes(self) -> tuple[Lifetime, ...]:
        """How long each layer's tokens are seen, for `KVSpec`: by a window, a chunk, or always."""
        found = []
        for layer in self.layers:
            window, chunk = layer.options.of(Window), layer.options.of(Chunk)
            if window is not None:
                found.append(Lifetime("window", window.size))
            else:
                found.append(FULL if chunk is None else Lifetime("chunk", chunk.size))
        return tuple(found)


class NeedsNumbers(UnsupportedModel):
    """The model cannot be run on the meta device. With its weights it may be supported."""


@dataclass(frozen=True)
class _MaskRule:
    """The mask that layers get under the probe: the rule itself, which can be evaluated at any position."""

    visible: Any  # (batch, head, query position, key position) → bool tensor
    shape: tuple[int, int, int, int] = (1, 1, 1, 1)  # of the mask that transformers would make by the rule

    @property
    def ndim(self) -> int:
        """The dims of that mask. A wrapper hands it to its text model, which looks whether it is ready."""
        return len(self.shape)

    def __getattr__(self, name: str) -> Any:
        # The attribute of a tensor was meant: the model computes with its mask.
        raise LightKVError(f"it changes its attention mask (by the mask's {name})")

    def __getitem__(self, index: Any) -> Any:
        raise LightKVError("it changes its attention mask (by taking a part of it)")

    def __radd__(self, other: Any) -> Any:
        raise LightKVError("it changes its attention mask (by adding it to another)")

    def sees(self, query: int, keys: list[int], device: torch.device) -> list[bool]:
        """Returns, for each position in `keys`, whether a query at position `query` may attend to it."""
        zero = torch.zeros((), dtype=torch.int64, device="cpu" if device.type == "meta" else device)
        return [bool(self.visible(zero, zero, zero + query, zero + key)) for key in keys]


class _ShapeRecorder:
    """An AttentionHandler that records the shape and the options of every call, and returns zeros."""

    def __init__(self, architecture: str) -> None:
        self.architecture = architecture
        self.layers: dict[int, LayerShape] = {}
        self.dtypes: set[torch.dtype] = set()
        self.kv: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # of the layers that make their own
        self.holders: dict[int, int] = {}
        self.mixers: dict[int, Mixer] = {}  # by the layer

    def mix(self, mixer: Mixer, x: torch.Tensor) -> torch.Tensor:
        self.mixers[mixer.module.layer_idx] = mixer
        return torch.zeros_like(x)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        q, k, v = call.q, call.k, call.v
        idx = getattr(call.module, "layer_idx", None)
        if not isinstance(idx, int):
            raise self._unsupported(f"{type(call.module).__name__} does not say which layer it is")
        if idx in self.layers:
            raise self._unsupported(f"layer {idx} attends more than once, and a layer holds one K/V a token")
        options = self._options(call)
        if k.shape[:-1] != v.shape[:-1] or k.shape[2] != q.shape[2] or q.shape[1] % k.shape[1]:
            raise self._unsupported(f"layer {idx} attends q {q.shape}, k {k.shape}, v {v.shape}")
        self.layers[idx] = LayerShape(q.shape[1], q.shape[-1], k.shape[1], options, v.shape[-1])
        self.dtypes |= {k.dtype, v.dtype}
        # A layer that reads another one's K/V is given the very tensors.
        self.holders[idx] = next((one for one, kv in self.kv.items() if kv[0] is k and kv[1] is v), idx)
        if self.holders[idx] == idx:
            self.kv[idx] = k, v
        return q.new_zeros(call.output_shape)

    def _options(self, call: AttentionCall) -> AttentionOptions:
        arguments = dict(call.arguments)
        scale = arguments.pop("scaling", None)
        window = arguments.pop("sliding_window", None) or 0
        softcap = arguments.pop("softcap", None) or 0.0
        causal = arguments.pop("is_causal", None)
        if causal is None:
            causal = getattr(call.module, "is_causal", True)
        # BigBird-Pegasus leaves it to the mask.
        rule = call.mask if isinstance(call.mask, _MaskRule) else None
        if not causal and (rule is None or rule.sees(_FAR, [_FAR + 1], call.q.device) == [True]):
            raise self._unsupported("its attention is not causal")
        sink_logits = self._sink_logits(arguments.pop("s_aux", None), call)
        alibi_slopes = arguments.pop("alibi_slopes", None)
        given = {name for name, value in arguments.items() if not isinstance(value, bool | None)}
        if unknown := given - _HARMLESS:
            raise self._unsupported(f"its attention takes {', '.join(sorted(unknown))}, unknown here")
        chunk = 0
        if rule is not None:
            window, chunk = self._seen(rule, int(window), call)
        elif call.mask is not None:
            raise self._unsupported("it makes an attention mask of its own")
        variants = (
            Softcap(float(softcap)) if softcap else None,
            None if alibi_slopes is None else Alibi(alibi_slopes),
            Window(int(window)) if window else None,
            Chunk(chunk) if chunk else None,
            None if sink_logits is None else SinkLogits(sink_logits),
        )
        return AttentionOptions(scale).plus(*variants)

    def _sink_logits(self, sinks: Any, call: AttentionCall) -> torch.Tensor | None:
        """Returns a layer's learned sinks, float32 `[num_heads]`, from what its module passes as `s_aux`."""
        if sinks is None:
            return None
        num_heads = call.q.shape[1]
        if not isinstance(sinks, torch.Tensor) or sinks.numel() != num_heads:
            raise self._unsupported(f"its learned sinks (s_aux) are not one for each of {num_heads} heads")
        return sinks.detach().float().reshape(num_heads).contiguous()

    def _seen(self, mask: _MaskRule, window: int, call: AttentionCall) -> tuple[int, int]:
        """Returns the window and the chunk to which `mask` limits queries, each 0 if there is none.

        The window is the one that the call names (`window`, if not 0), or else that of the configuration, which
        Phi-MoE's mask has and its attention does not name. Raises UnsupportedModel for any other mask.
        """
        device, config = call.q.device, call.module.config

        def named(field: str) -> int:
            size = getattr(config, field, None)
            return size if type(size) is int and size > 0 and not window else 0

        chunk = named("attention_chunk_size")
        try:
            for size in dict.fromkeys((window, named("sliding_window") or window)):
                if _is_window(mask, size, device):
                    return size, 0
            if chunk and _is_chunked(mask, chunk, device):
                return 0, chunk
        except NotImplementedError:
            # The rule of chunks reads a tensor, which has no numbers on the meta device.
            if not chunk or device.type != "meta":
                raise
            return 0, chunk
        raise self._unsupported("its mask is neither causal nor the sliding window or the chunks it names")

    def _unsupported(self, reason: str) -> UnsupportedModel:
        return UnsupportedModel(self.architecture, reason)


def _is_window(mask: _MaskRule, window: int, device: torch.device) -> bool:
    """Returns whether a query sees exactly the last `window` keys up to its own; all of them if that is 0."""
    first = _FAR - window + 1 if window else 0
    keys = [*([first - 1] if window else []), first, (first + _FAR) // 2, _FAR, _FAR + 1]
    return mask.sees(_FAR, keys, device) == [*([False] if window else []), True, True, True, False]


def _is_chunked(mask: _MaskRule, chunk: int, device: torch.device) -> bool:
    """Returns whether a query sees exactly the keys of its chunk up to its own, in two chunks side by side."""
    first = _FAR // chunk * chunk
    return all(
        mask.sees(query, [0, begin - 1, begin, query, query + 1], device) == [False, False, True, True, False]
        for begin in (first, first + chunk)
        for query in {begin, begin + chunk // 2, begin + chunk - 1}
    )


def find_shape(model: PreTrainedModel) -> ModelShape:
    """Returns how `model` calls its attention, from one pass whose numbers do not matter; the model stays as it
    was. Raises UnsupportedModel."""
    architecture = type(model).__name__
    recorder = _ShapeRecorder(architecture)
    text = model.config.get_text_config()
    count = num_layers(text)
    if count is None:
        raise UnsupportedModel(architecture, "its configuration does not say how many layers it has")
    positions = torch.arange(3, device=model.device)
    with probed(model):
        output = model(
            input_ids=torch.zeros_like(positions)[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=positions[::2],  # neither all nor the last: a model that only takes a count fails
            lightkv=recorder,
            # Without a cache transformers reads the positions, to find packed texts; on meta there are none.
            **{cache_name(model): Past(count, 0) if model.device.type == "meta" else None},
        )
        logits_shape = tuple(output.logits.shape)
    if logits_shape != (1, 2, text.vocab_size):
        reason = f"asked for the logits of 2 tokens of {text.vocab_size}, it returns them as {logits_shape}"
        raise UnsupportedModel(architecture, reason)
    types = getattr(text, "layer_types", None) or ()
    wanted = set(range(count)) - {idx for idx, kind in enumerate(types) if kind in _MLP_LAYERS}
    if recorder.layers.keys() | recorder.mixers.keys() != wanted or not recorder.layers:
        reason = f"of {len(wanted)} layers, {len(recorder.layers)} call the attention interface"
        if recorder.mixers:
            reason += f", and {len(recorder.mixers)} keep a state"
        raise UnsupportedModel(architecture, reason)
    numbers = tuple(sorted(recorder.layers))
    layers = tuple(recorder.layers[idx] for idx in numbers)
    if len(recorder.dtypes) > 1:
        raise UnsupportedModel(architecture, f"the types of its layers' K/V differ: {recorder.dtypes}")
    (dtype,) = recorder.dtypes
    heads = [KVHeads(layer.num_kv_heads, layer.head_dim, cast(int, layer.v_dim)) for layer in layers]
    holders = [numbers.index(recorder.holders[idx]) for idx in numbers]
    try:
        spec = KVSpec(
            len(layers),
            *heads[0],
            dtype,
            layer_heads=None if len(set(heads)) == 1 else heads,
            holders=None if holders == list(range(len(layers))) else holders,
            states=[recorder.mixers[idx].tensors for idx in sorted(recorder.mixers)],
        )
    except ValueError as error:  # of a size that is 0, such as that of a convolution of one token
        raise UnsupportedModel(architecture, str(error)) from error
    shape = ModelShape(spec, layers, numbers if recorder.mixers else None)
    for layer, holder in enumerate(holders):
        if layer != holder and shape.lifetimes[layer] != shape.lifetimes[holder]:
            reason = f"layer {layer} reads the K/V of layer {holder}, but sees other tokens than that"
            raise UnsupportedModel(architecture, reason)
    return shape


@contextmanager
def probed(model: PreTrainedModel) -> Iterator[None]:
    """Puts `model` on the probe's attention and into evaluation mode while the block runs.

    Raises UnsupportedModel, also in place of any error that the model itself raises.
    """
    undo = undo_binding(model)
    AttentionMaskInterface.register(PROBE, _mask_rule)
    switch_attention(model, PROBE)
    try:
        fix_rotary(model)
        fix_positions(model)
        bind_mixers(model)
        with evaluated(model), torch.no_grad():
            yield
    except (UnsupportedModel, torch.OutOfMemoryError):
        raise
    except LightKVError as error:  # raised where the architecture is not known
        raise UnsupportedModel(type(model).__name__, str(error)) from error
    except Exception as error:
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        reason = f"its forward pass fails when probed ({said})"
        needs_numbers = isinstance(error, RuntimeError) and "meta" in str(error)  # not a shape that is wrong
        raise (NeedsNumbers if needs_numbers else UnsupportedModel)(type(model).__name__, reason) from error
    finally:
        undo()


def _mask_rule(
    *, mask_function: Any, q_length: int, kv_length: int, attention_mask: Any = None, **_: Any
) -> _MaskRule:
    """The mask function that transformers calls. A mask that is ready stays, as it does in transformers."""
    if isinstance(attention_mask, _MaskRule):
        return attention_mask
    return _MaskRule(mask_function, (1, 1, q_length, kv_length))


class RecordingLayer(CacheLayerMixin):
    """A layer of a cache that claims to hold `length` tokens, and returns only the K/V of new ones. `calls`
    holds what it was given."""

    def __init__(self, length: int = 0) -> None:
        super().__init__()
        self.calls: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._length = length

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Does nothing: nothing is allocated."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls.append((key_states, value_states))
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._length + query_length, 0

    def get_seq_length(self) -> int:
        return self._length

    def get_max_length(self) -> int:
        return -1


@contextmanager
def evaluated(module: Any) -> Iterator[None]:
    """Puts `module` into evaluation mode while the block runs: dropout would differ between passes, and a layer
    may be skipped in training."""
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True


class Past(Cache):
    """A cache of such layers."""

    def __init__(self, num_layers: int, length: int) -> None:
        super().__init__(layers=[RecordingLayer(length) for _ in range(num_layers)])
