"""What a Hugging Face model computes as attention, found by running it a few times over a few tokens.

A model is refused here, with the reason, where lightkv would not compute exactly what the model computes by
itself: because of what its attention takes, or because what it computes of a token depends on where the token
stands in the batch. Knows transformers' interfaces and no model by name.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import torch
from transformers import AttentionMaskInterface, Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from lightkv.attention import AttentionOptions, LayerShape
from lightkv.errors import LightKVError, UnsupportedModel
from lightkv.memory.kv_spec import KVSpec

from .context import context_length
from .hf_model import compute, fix_rotary, switch_attention, undo_binding

PROBE = (
    "lightkv_probe"  # lightkv's attention function, with a mask that says what the model would have masked
)

# Arguments of an attention call that change nothing here: dropout is off, positions are applied to q and k.
_HARMLESS = frozenset({"dropout", "position_ids", "cache_position", "use_cache"})
_FORWARD_ARGUMENTS = frozenset({"position_ids", "logits_to_keep"})  # of a model, beside input_ids
_FAR = 1 << 20  # a query position past any window or chunk, from which the probe looks at a mask
_NUM_TOKENS = 8  # in each pass that is compared
_MIN_TOLERANCE = 2.0**-11  # of numbers whose type has less rounding: a deep model adds up many sums
# The order of these tokens in the packed pass: none has the neighbours, or the place, of its own pass.
_ORDER = (5, 2, 7, 0, 3, 6, 1, 4)


@dataclass(frozen=True)
class ModelShape:
    """What `probe` found: the K/V of one token, and every layer's attention."""

    spec: KVSpec
    layers: tuple[LayerShape, ...]


class NeedsNumbers(UnsupportedModel):
    """A model cannot be run on the meta device; with its weights it may be supported."""


def probe(model: PreTrainedModel) -> ModelShape:
    """What `model` computes as attention; the model stays as it was.

    The model runs once over three tokens, to see how it calls its attention, and five times over eight, to see
    whether tokens that are packed in any order have the q, k, v and logits that they have in a pass of their
    own. A model on the meta device, which has no numbers, runs once, and is not compared.

    Raises UnsupportedModel for whatever lightkv would not compute exactly, and for a model that cannot be
    called as `compute` calls it.
    """
    architecture = type(model).__name__
    # By its signature: a **kwargs would swallow what the model does not know.
    if missing := _FORWARD_ARGUMENTS - inspect.signature(type(model).forward).parameters.keys():
        raise UnsupportedModel(architecture, f"its forward pass takes no {' and no '.join(sorted(missing))}")
    shape = find_shape(model)
    if model.device.type != "meta":
        _require_packable(model, shape)
    return shape


# --------------------------------------------------------------------------------
# How the model calls its attention


@dataclass(frozen=True)
class _MaskRule:
    """What a layer gets as its mask under the probe: the rule itself, to be asked at any position."""

    visible: Any  # (batch, head, query position, key position) → bool tensor

    def __getattr__(self, name: str) -> Any:
        # Of a tensor: the model computes with its mask.
        raise LightKVError(f"it changes its attention mask (by the mask's {name})")

    def __getitem__(self, index: Any) -> Any:
        raise LightKVError("it changes its attention mask (by taking a part of it)")

    def sees(self, query: int, keys: list[int], device: torch.device) -> list[bool]:
        """Which `keys` a query at position `query` may attend."""
        zero = torch.zeros((), dtype=torch.int64, device="cpu" if device.type == "meta" else device)
        return [bool(self.visible(zero, zero, zero + query, zero + key)) for key in keys]


class _Recorder:
    """Takes the calls of a forward pass, and answers with zeros: only their form matters."""

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
        options = self._options(module, mask, dict(arguments), q.device)
        if k.shape[:-1] != v.shape[:-1] or k.shape[2] != q.shape[2] or q.shape[1] % k.shape[1]:
            raise self._unsupported(f"layer {idx} attends q {q.shape}, k {k.shape}, v {v.shape}")
        self.layers[idx] = LayerShape(q.shape[1], q.shape[-1], k.shape[1], options, v.shape[-1])
        self.dtypes |= {k.dtype, v.dtype}
        return q.new_zeros(q.shape[0], q.shape[2], q.shape[1], v.shape[-1])

    def _options(
        self, module: torch.nn.Module, mask: Any, arguments: dict[str, Any], device: torch.device
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
        if "s_aux" in given:
            raise self._unsupported("its attention has learned sinks (s_aux)")
        if unknown := given - _HARMLESS:
            raise self._unsupported(f"its attention takes {', '.join(sorted(unknown))}, unknown here")
        if isinstance(mask, _MaskRule):
            first = _FAR - window + 1 if window else 0
            keys = [*([first - 1] if window else []), first, (first + _FAR) // 2, _FAR, _FAR + 1]
            expected = [*([False] if window else []), True, True, True, False]
            if mask.sees(_FAR, keys, device) != expected:
                chunk = getattr(module.config, "attention_chunk_size", None)
                if chunk and not mask.sees(_FAR // chunk * chunk, [_FAR // chunk * chunk - 1], device)[0]:
                    raise self._unsupported(f"its attention is chunked (attention_chunk_size {chunk})")
                raise self._unsupported("its mask is neither causal nor the sliding window it names")
        elif mask is not None:
            raise self._unsupported("it makes an attention mask of its own")
        return AttentionOptions(scale, int(window), float(softcap))

    def _unsupported(self, reason: str) -> UnsupportedModel:
        return UnsupportedModel(self.architecture, reason)


def find_shape(model: PreTrainedModel) -> ModelShape:
    """What `probe` returns, from one pass, in which the numbers do not matter. Raises UnsupportedModel."""
    architecture = type(model).__name__
    recorder = _Recorder(architecture)
    text = model.config.get_text_config()
    positions = torch.arange(3, device=model.device)
    with _probed(model):
        output = model(
            input_ids=torch.zeros_like(positions)[None],
            position_ids=positions[None],
            # Without one, transformers looks for packed texts in the positions, which the meta device has not.
            past_key_values=_Past(text.num_hidden_layers, 0) if model.device.type == "meta" else None,
            use_cache=False,
            logits_to_keep=positions[::2],  # neither all nor one: a model that knows only a count fails
            lightkv=recorder,
        )
        logits_shape = tuple(output.logits.shape)
    if logits_shape != (1, 2, text.vocab_size):
        reason = f"asked for the logits of 2 tokens of {text.vocab_size}, it returns them as {logits_shape}"
        raise UnsupportedModel(architecture, reason)
    num_layers = text.num_hidden_layers
    if sorted(recorder.layers) != list(range(num_layers)):
        reason = f"of {num_layers} layers, {len(recorder.layers)} call the attention interface"
        raise UnsupportedModel(architecture, reason)
    layers = tuple(recorder.layers[idx] for idx in range(num_layers))
    shapes = {(layer.num_kv_heads, layer.head_dim, cast(int, layer.v_dim)) for layer in layers}
    if len(shapes) > 1 or len(recorder.dtypes) > 1:
        reason = f"its layers' K/V differ: (KV heads, K dim, V dim) {sorted(shapes)}, {recorder.dtypes}"
        raise UnsupportedModel(architecture, reason)
    (shape,), (dtype,) = shapes, recorder.dtypes
    return ModelShape(KVSpec(num_layers, *shape, dtype), layers)


@contextmanager
def _probed(model: PreTrainedModel) -> Iterator[None]:
    """`model` on the probe's attention and in evaluation mode, for as long as the block runs.

    Raises UnsupportedModel, also in place of what the model itself raises, which can be anything.
    """
    undo = undo_binding(model)
    training = [
        module for module in model.modules() if module.training
    ]  # dropout would differ between passes
    AttentionMaskInterface.register(PROBE, _mask_rule)
    switch_attention(model, PROBE)
    try:
        fix_rotary(model)
        model.eval()
        with torch.no_grad():
            yield
    except (UnsupportedModel, torch.OutOfMemoryError):
        raise
    except LightKVError as error:  # from where the architecture is not known
        raise UnsupportedModel(type(model).__name__, str(error)) from error
    except Exception as error:
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        reason = f"its forward pass fails when probed ({said})"
        needs_numbers = model.device.type == "meta" and isinstance(error, RuntimeError)
        raise (NeedsNumbers if needs_numbers else UnsupportedModel)(type(model).__name__, reason) from error
    finally:
        undo()
        for module in training:
            module.training = True


def _mask_rule(*, mask_function: Any, **_: Any) -> _MaskRule:
    """transformers' mask function."""
    return _MaskRule(mask_function)


# --------------------------------------------------------------------------------
# Whether a token is computed the same wherever it stands


class _PastLayer(CacheLayerMixin):
    """A layer of `_Past`. `cached`: the shapes of what it was last given."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.cached: list[tuple[int, ...]] = []
        self._length = length

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing is kept."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.cached = [tuple(key_states.shape), tuple(value_states.shape)]
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._length + query_length, 0

    def get_seq_length(self) -> int:
        return self._length

    def get_max_length(self) -> int:
        return -1


class _Past(Cache):
    """Says that `length` tokens are cached, and gives the K/V of new ones back as they came."""

    def __init__(self, num_layers: int, length: int) -> None:
        super().__init__(layers=[_PastLayer(length) for _ in range(num_layers)])


class _Projections:
    """Keeps q, k and v of every layer, and answers with each token's own v.

    So what a layer computes of a token shows in the layers after it, and no token depends on another.
    """

    def __init__(self) -> None:
        self.found: list[torch.Tensor] = []  # of each layer q, k and v, each [T, heads * dim]

    def attend(
        self,
        module: torch.nn.Module,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: Any,
        arguments: dict[str, Any],
    ) -> torch.Tensor:
        self.found += [heads[0].transpose(0, 1).flatten(1) for heads in (q, k, v)]
        return v.repeat_interleave(q.shape[1] // v.shape[1], dim=1).transpose(1, 2).contiguous()


def require_plain_cache(model: PreTrainedModel, shape: ModelShape) -> None:
    """Raises UnsupportedModel where the model's layers cache something else than the K and V they attend."""
    spec, ids = shape.spec, torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    past = _Past(spec.num_layers, 0)
    with _probed(model):
        model(input_ids=ids, past_key_values=past, use_cache=True, lightkv=_Projections())
    expected = [(1, spec.num_kv_heads, 1, dim) for dim in (spec.k_dim, spec.v_dim)]
    for idx, layer in enumerate(past.layers):
        if cast(_PastLayer, layer).cached != expected:
            found = cast(_PastLayer, layer).cached
            reason = (
                f"of a token, layer {idx} caches {found}, where its attention takes K and V as {expected}"
            )
            raise UnsupportedModel(type(model).__name__, reason)


def _require_packable(model: PreTrainedModel, shape: ModelShape) -> None:
    """Raises UnsupportedModel where a token's q, k, v or logits depend on its place among those packed."""
    text = model.config.get_text_config()
    context = context_length(text)
    num_tokens = _NUM_TOKENS if context is None else min(_NUM_TOKENS, context)
    ids = _varied_ids(text.vocab_size, num_tokens, text.pad_token_id).to(model.device)
    positions = torch.arange(num_tokens, device=ids.device)
    order = torch.tensor([token for token in _ORDER if token < num_tokens], device=ids.device)
    far = (context or num_tokens) - num_tokens  # as far into a text as the model goes

    def packed(positions: torch.Tensor) -> _Pass:
        """In `order`; given back as if it had been none."""
        receiver = _Projections()
        logits = compute(model, ids[order], positions[order], receiver, None)
        return _Pass([part[order.argsort()] for part in (*receiver.found, logits)])

    def own(**arguments: Any) -> _Pass:
        receiver = _Projections()
        output = model(input_ids=ids[None], lightkv=receiver, **arguments)
        return _Pass([*receiver.found, output.logits[0]])

    def refuse(difference: str, what: str) -> NoReturn:
        raise UnsupportedModel(type(model).__name__, f"{what} ({difference})")

    with _probed(model):
        given = own(position_ids=positions[None], use_cache=False)
        if difference := given.difference(own(use_cache=False)):
            refuse(difference, "it does not count a text's positions from 0")
        if difference := given.difference(packed(positions)):
            refuse(difference, "what it computes of a token depends on the token's place in the batch")
        if far:
            past = _Past(shape.spec.num_layers, far)
            there = own(position_ids=(positions + far)[None], past_key_values=past, use_cache=True)
            if difference := there.difference(packed(positions + far)):
                what = f"what it computes of a token after {far} others depends on more than its position"
                refuse(difference, what)


@dataclass(frozen=True)
class _Pass:
    """What a forward pass computed of each token: q, k and v of each layer, then the logits, each `[T, n]`."""

    found: list[torch.Tensor]

    def difference(self, other: "_Pass") -> str | None:
        """The first difference that is more than rounding, in words; None if there is none."""
        if len(self.found) != len(other.found):
            return f"{len(self.found)} and {len(other.found)} tensors"
        for idx, (ours, theirs) in enumerate(zip(self.found, other.found, strict=True)):
            error = _relative_error(ours, theirs)
            if error > max(4 * torch.finfo(ours.dtype).eps, _MIN_TOLERANCE):
                name = f"{'qkv'[idx % 3]} of layer {idx // 3}" if idx + 1 < len(self.found) else "the logits"
                return f"{name} differ by {error:.2g} of the largest"
        return None


def _relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The median, over tokens, of a token's largest difference in proportion to its largest number.

    A matrix product may round otherwise for other rows beside it, which can send a token to another expert; so
    one token decides nothing. What the order changes, it changes for more than half of them.
    """
    ours, theirs = (torch.nan_to_num(x.float()) for x in (ours, theirs))
    largest = theirs.abs().amax(1).clamp(min=1e-30)
    return float(((ours - theirs).abs().amax(1) / largest).median())


def _varied_ids(vocab_size: int, count: int, padding: int | None) -> torch.Tensor:
    """`count` token ids, int64, spread over the vocabulary; none is the padding, which some models skip."""
    ids = [(idx + 1) * vocab_size // (count + 1) for idx in range(count)]
    return torch.tensor([token - 1 if token == padding and token else token for token in ids])
