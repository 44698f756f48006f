"""What a layer with states is to a model: a mixer, which computes its tokens over the passes of a step.

`bind_mixers` gives the modules that are known by the names of their classes a forward pass that hands their
input to the handler of the call. `require_own_mixers` compares each with its own code.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from inspect import isfunction, unwrap
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel

from lightkv.errors import LightKVError, UnsupportedModel
from lightkv.integrations.weights.weight import Weight
from lightkv.memory.kv_spec import StateTensor
from lightkv.memory.state_memory import StateSlots
from lightkv.memory.state_passes import CHUNK, StatePass

from . import gated_delta, lightning, mamba2, short_conv
from .heads import Heads

_NUM_TOKENS = 96  # of the text on which a mixer is compared with its own code: past a chunk of its kernels
_MIN_TOLERANCE = 2.0**-9  # a GPU's products of chunks are of ten bits (TF32) in float32, too
_CUTS = (5, 1, 1, 70, 19)  # the same text in pieces, and decodes among them


class Mixer(Protocol):
    """A layer that mixes tokens by a state. `index`: which of the model's layers with states it is."""

    @property
    def module(self) -> Any: ...
    @property
    def index(self) -> int: ...

    @property
    def one_input(self) -> tuple[str, ...]:
        """The names of its linear layers that get its input, if they may be one product: `joined`."""

    @property
    def tensors(self) -> tuple[StateTensor, ...]:
        """The tensors of its state."""

    @property
    def heads(self) -> Heads | None:
        """How it is divided by heads; None if each rank has to compute all of it."""

    def forward(self, x: Tensor, passes: Sequence[StatePass], state: Mapping[str, Tensor]) -> Tensor:
        """Computes the tokens x `[T, C]` of a step, and returns as many vectors. `state`: its tensors by their
        names, `[num_slots, *shape]`. Tokens that are in no pass are padding."""


# By the class of the module.
_KINDS: Mapping[str, Callable[[Any, int], Mixer]] = {
    **gated_delta.KINDS,
    **lightning.KINDS,
    **mamba2.KINDS,
    **short_conv.KINDS,
}
_PAIRS = frozenset(lightning.KINDS)  # of these, the layer takes the first of two that they return

# What other layers with states compute, by the type of the (text) model.
_MAMBA1 = "Mamba-1, whose selective scan no pinned library computes"
_KDA = "a delta rule with a gate for each dim of a key (KDA), beside latent attention"
_CONVOLVED = "convolutions of keys and values before they are cached"
_SELECTED = "a gated delta rule, beside attention over keys that an index selects"
UNKNOWN = {
    "bailing_hybrid": _KDA,
    "deepseek_v4": "keys that are compressed over windows of tokens",
    "falcon_mamba": _MAMBA1,
    "glm5_next_text": _KDA,
    "inkling2_text": _CONVOLVED,
    "inkling_text": _CONVOLVED,
    "jamba": _MAMBA1,
    "kimi_linear": _KDA,
    "mamba": _MAMBA1,
    "mamba2": "Mamba-2 in every layer, so that no layer has K/V",
    "qwen4_exp_text": _SELECTED,
    "recurrent_gemma": "a real-gated linear recurrent unit (RG-LRU)",
    "rwkv": "RWKV's time mixing",
    "xlstm": "xLSTM's cells",
    "zamba": _MAMBA1,
    "zaya": "convolutions of queries and keys, and delayed values (CCA)",
}


def has_mixers(config: PreTrainedConfig) -> bool:
    """Returns whether transformers defines a module that is known here beside the model of this (text)
    configuration."""
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return not _KINDS.keys().isdisjoint(vars(sys.modules[getattr(model_class, "__module__", __name__)]))


def mixers_of(model: PreTrainedModel) -> list[Mixer]:
    """Returns the mixers of `model`, in the order of its layers."""
    known = [module for module in model.modules() if type(module).__name__ in _KINDS]
    return [_KINDS[type(module).__name__](module, index) for index, module in enumerate(known)]


def bind_mixers(model: PreTrainedModel) -> None:
    """Makes the modules of `model` that keep a state compute by the handler of a call of `compute`; in other
    calls they run their own code. `release_mixers` undoes it."""
    for mixer in mixers_of(model):
        mixer.module.forward = partial(_forward, mixer)


def release_mixers(model: PreTrainedModel) -> None:
    """Gives the modules that `bind_mixers` changed their own forward pass."""
    for module in filter(is_bound_mixer, model.modules()):
        del cast(Any, module).forward


def is_mixer(module: Any) -> bool:
    """Returns whether `module` is one that `bind_mixers` changes."""
    return type(module).__name__ in _KINDS


def is_bound_mixer(module: nn.Module) -> bool:
    """Returns whether `bind_mixers` has changed `module`."""
    forward = vars(module).get("forward")
    return isinstance(forward, partial) and forward.func is _forward


def _forward(mixer: Mixer, hidden_states: Tensor, *args: Any, lightkv: Any = None, **kwargs: Any) -> Any:
    """The forward pass of a module with a state."""
    if lightkv is None:
        return type(mixer.module).forward(mixer.module, hidden_states, *args, **kwargs)
    if not hasattr(lightkv, "mix"):
        raise LightKVError("its layers keep a state, which is not kept here; the service and LLM run it")
    out = lightkv.mix(mixer, hidden_states)
    return (out, None) if type(mixer.module).__name__ in _PAIRS else out


def bound_mixer(module: Any) -> Any:
    """Returns the mixer of a module that `bind_mixers` has changed."""
    return module.forward.args[0]


def join_projections(module: Any, joined: Weight) -> None:
    """Makes a bound mixer compute the linear layers of its input as the one product `joined`."""
    module.forward = partial(_forward, replace(bound_mixer(module), joined=joined))


@torch.no_grad()
def require_own_mixers(model: PreTrainedModel) -> None:
    """Raises UnsupportedModel where a mixer of `model`, as it is bound or else as `bind_mixers` would bind it,
    computes anything but its own code, on noise: in one piece, and cut into pieces and single tokens."""
    for mixer in mixers_of(model):
        if is_bound_mixer(mixer.module):
            mixer = bound_mixer(mixer.module)
        module = mixer.module
        weight = next(module.parameters())
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(_NUM_TOKENS, model.config.get_text_config().hidden_size, generator=generator)
        x = x.to(weight.device, model.dtype)
        with _plain_functions(module):
            own = type(module).forward(module, x[None], None, None)  # no cache, or no positions, and no mask
        own = (own[0] if isinstance(own, tuple) else own)[0].float()
        for cuts in ((_NUM_TOKENS,), _CUTS):
            error = float((_in_pieces(mixer, x, cuts).float() - own).abs().max() / own.abs().max())
            if not error <= max(16 * torch.finfo(x.dtype).eps, _MIN_TOLERANCE):
                what = f"its {type(module).__name__} differs from its own code by {error:.2g} of the largest"
                raise UnsupportedModel(type(model).__name__, f"{what} (a text in pieces of {cuts})")


@contextmanager
def _plain_functions(module: Any) -> Iterator[None]:
    """Has the code of a module call transformers' functions in torch while the block runs, where it would call
    those of packages that are installed beside it."""
    names = vars(sys.modules[type(module).__module__])
    before = {name: one for name, one in names.items() if isfunction(one) and hasattr(one, "__wrapped__")}
    names.update({name: unwrap(one) for name, one in before.items()})
    try:
        yield
    finally:
        names.update(before)


def _in_pieces(mixer: Mixer, x: Tensor, cuts: Iterable[int]) -> Tensor:
    """Computes x `[T, C]` as one sequence in pieces of `cuts` tokens, each from the state of the one before."""
    state = {
        name: torch.zeros((2, *shape), dtype=dtype, device=x.device) for name, shape, dtype in mixer.tensors
    }
    found, reads = [], 0
    for piece in x.split(list(cuts)):
        slots = StateSlots(*torch.tensor([[reads], [1]], device=x.device))
        starts = torch.tensor([0, len(piece)], dtype=torch.int32, device=x.device)
        chunks = 0 if len(piece) == 1 else -(-len(piece) // CHUNK)
        found.append(mixer.forward(piece, [StatePass(slice(0, len(piece)), starts, slots, chunks)], state))
        reads = 1
    return torch.cat(found)
