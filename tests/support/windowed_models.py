"""Tiny random models of families that mix layers which see everything with layers that see a window or a chunk.

`FAMILIES` is a table: for each family the fields that its configuration gets, what each layer then sees and
holds, and why lightkv refuses the family, if it does. Windows and chunks are shorter than the prompts of tests,
so that an answer is wrong where a window is. Engines over these models are made here, too.
"""

import random
from array import array
from collections.abc import Sequence
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from lightkv.ledger import Session
from lightkv.router import EngineConfig, SamplingParams
from lightkv.router.engine.admission import Admission
from lightkv.router.engine.loop import LocalEngine, make_scheduler
from lightkv.router.engine.request import Request
from lightkv.router.model.build import assemble
from tests.support.model_worker import run
from tests.support.tiny_architectures import VOCABULARY, random_weights, tiny

CONTEXT = 128  # tokens that the models have positions for


class Heads(NamedTuple):
    """The heads of a layer and their dims."""

    num_heads: int
    num_kv_heads: int
    k_dim: int
    v_dim: int


class LayerKind(NamedTuple):
    """What a query of one layer sees, and the K/V that the layer holds of each token.

    Attributes:
        sees: all tokens up to its own; the last `size` of them; or those of its chunk of `size` tokens.
        size: 0 for a layer that sees all.
        reads: the layer whose K/V this one reads in place of K/V of its own, of which it holds none then.
    """

    sees: Literal["full", "window", "chunk"]
    size: int
    heads: Heads
    reads: int | None = None


class Family(NamedTuple):
    """A family of models, and a tiny configuration of it.

    Attributes:
        model_type: transformers' name of the configuration.
        fields: of the configuration, beside the sizes that `tiny_architectures` gives to all.
        layer_kinds: one for each layer.
    """

    model_type: str
    fields: dict[str, Any]
    layer_kinds: tuple[LayerKind, ...]

    def config(self) -> PreTrainedConfig:
        """Returns a new configuration. Models change theirs, so that each needs its own."""
        return tiny(self.model_type, fields=self.fields)

    def model(self) -> PreTrainedModel:
        """Returns a new float32 model, whose random weights are the same each time."""
        return random_weights(self.config())


def _layers(pattern: str, size: int, heads: Heads, full_heads: Heads | None = None) -> tuple[LayerKind, ...]:
    """Returns layers in the order of the letters of `pattern`: F sees all, W a window, C a chunk of `size`.
    `full_heads`: those of the layers that see all, where they differ from the others'."""
    of_letter = {
        "F": LayerKind("full", 0, full_heads or heads),
        "W": LayerKind("window", size, heads),
        "C": LayerKind("chunk", size, heads),
    }
    return tuple(of_letter[letter] for letter in pattern)


_TWO_OF_FOUR = Heads(4, 2, 8, 8)  # what `tiny_architectures` gives to all
# Gemma-4's layers that see all have wider heads. Three layers at the end read the K/V of the last layer before
# them that sees as much: layers 3 and 4 that of layer 1, and layer 5 that of layer 2.
_GEMMA4_SHARING = tuple(
    kind._replace(reads=reads)
    for kind, reads in zip(
        _layers("WWFWWF", 12, _TWO_OF_FOUR, Heads(4, 2, 16, 16)), (None, None, None, 1, 1, 2), strict=True
    )
)
_GEMMA3N_SHARING = tuple([kind._replace(heads=_TWO_OF_FOUR) for kind in _GEMMA4_SHARING])
_GEMMA4_FIELDS = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "sliding_window": 12,
    "global_head_dim": 16,
    "vocab_size_per_layer_input": VOCABULARY,
}

# Where a family's fields name no `layer_types`, its configuration makes them by the family's own pattern.
FAMILIES = {
    "gemma2": Family(
        "gemma2",
        {"sliding_window": 12, "query_pre_attn_scalar": 8},
        _layers("WFWF", 12, _TWO_OF_FOUR),
    ),
    # Five windows to a full layer, and windows at the end, as in Gemma-3-1B.
    "gemma3": Family(
        "gemma3_text",
        {
            "num_hidden_layers": 7,
            "sliding_window": 8,
            "query_pre_attn_scalar": 8,
            "num_key_value_heads": 1,
        },
        _layers("WWWWWFW", 8, Heads(4, 1, 8, 8)),
    ),
    "gemma4-sharing": Family(
        "gemma4_text",
        {**_GEMMA4_FIELDS, "num_kv_shared_layers": 3, "hidden_size_per_layer_input": 8},
        _GEMMA4_SHARING,
    ),
    # Layers that see all have one product for K and V, and fewer K/V heads.
    "gemma4-tied": Family(
        "gemma4_text",
        {
            **_GEMMA4_FIELDS,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 0,
        },
        _layers("WWFWWF", 12, _TWO_OF_FOUR, Heads(4, 1, 16, 16)),
    ),
    # The layers at the end read others' K/V here, too, and the residual has several streams.
    "gemma3n": Family(
        "gemma3n_text",
        {
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
            "sliding_window": 12,
            "num_kv_shared_layers": 3,
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 8,
            "activation_sparsity_pattern": None,
            "intermediate_size": 48,
            "laurel_rank": 4,
        },
        _GEMMA3N_SHARING,
    ),
    "gpt-oss": Family(
        "gpt_oss",
        {"sliding_window": 16, "num_attention_heads": 8},
        _layers("WFWF", 16, Heads(8, 2, 8, 8)),
    ),
    "llama4": Family(
        "llama4_text",
        {"attention_chunk_size": 16},
        _layers("CCCF", 16, _TWO_OF_FOUR),
    ),
    "cohere2": Family(
        "cohere2",
        {"sliding_window": 20},
        _layers("WWWF", 20, _TWO_OF_FOUR),
    ),
    "olmo3": Family(
        "olmo3",
        {"sliding_window": 10},
        _layers("WWWF", 10, _TWO_OF_FOUR),
    ),
    # Four windows to two full layers: two lanes leave no rest.
    "exaone4": Family(
        "exaone4",
        {"num_hidden_layers": 6, "sliding_window": 24, "sliding_window_pattern": 3},
        _layers("WWFWWF", 24, _TWO_OF_FOUR),
    ),
    "ministral": Family(
        "ministral",
        {"layer_types": ["full_attention", *["sliding_attention"] * 3], "sliding_window": 9},
        _layers("FWWW", 9, _TWO_OF_FOUR),
    ),
    # What the configuration is without `layer_types`: no layer sees all.
    "ministral-windows": Family(
        "ministral",
        {"num_hidden_layers": 3, "sliding_window": 9},
        _layers("WWW", 9, _TWO_OF_FOUR),
    ),
    # Three windows to two full layers: two lanes leave a rest.
    "granite-swa": Family(
        "granite_swa",
        {"num_hidden_layers": 5, "sliding_window": 14},
        _layers("FWWWF", 14, _TWO_OF_FOUR),
    ),
    # Windows have twice the K/V heads, and K and V differ in their dims.
    "mimo-v2": Family(
        "mimo_v2_flash",
        {"num_attention_heads": 8, "head_dim": 12, "sliding_window": 11},
        _layers("FWWW", 11, Heads(8, 4, 12, 8), Heads(8, 2, 12, 8)),
    ),
    # Its mask is that of a window, of which its attention is not told. All layers stay one group.
    "phimoe": Family(
        "phimoe",
        {"sliding_window": 13},
        _layers("WWWW", 13, _TWO_OF_FOUR),
    ),
}


def own_answers(model: PreTrainedModel, prompts: Sequence[Sequence[int]], num_new: int) -> list[list[int]]:
    """Returns the `num_new` tokens that transformers' own `generate` adds to each prompt, greedily.

    The prompts run together, padded on the left. Those of Llama-4 run alone: in transformers 5.23 the factor by
    which it scales queries counts the padding.
    """
    if len(prompts) > 1 and getattr(model.config, "attn_temperature_tuning", False):
        return [own_answers(model, [prompt], num_new)[0] for prompt in prompts]
    width = max(map(len, prompts))
    ids, mask = torch.zeros(2, len(prompts), width, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    output = model.generate(  # type: ignore[operator]
        ids,
        attention_mask=mask,
        max_new_tokens=num_new,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return output[:, width:].tolist()


def make_engine(
    family: str,
    *,
    pool: int = 2000,
    chunk: int = 0,
    depth: int = 1,
    admission: Admission | None = None,
    device: str = "cpu",
) -> LocalEngine:
    """Returns an engine over a new model of this family.

    `pool`: the slots of its memory. `chunk`: the most prompt tokens of a step; 0 is no limit. `depth`: the
    steps in flight. `admission`: None counts each request with its `max_tokens`. On a GPU attention is
    Triton's, and steps are CUDA graphs if they can be.
    """
    config = EngineConfig(
        device=device,
        dtype="float32",
        kv_dtype="auto",
        attention_backend="torch" if device == "cpu" else "triton",
        max_total_tokens=pool,
        max_num_seqs=6,
        max_model_len=CONTEXT,
        prefill_chunk=chunk,
        session_share=1.0,
    )
    runner, info = assemble(FAMILIES[family].model().to(device), config, lambda line: None)
    return LocalEngine(make_scheduler(info, admission, depth), runner)


def request(name: str, prompt: Sequence[int], max_tokens: int, session: Session | None = None) -> Request:
    """Returns a greedy request, which only its length ends."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    return Request(name, array("i", prompt).tobytes(), params, seed=0, session=session)


def run_all(engine: LocalEngine, requests: Sequence[Request]) -> list[list[int]]:
    """Runs requests to their ends, beside those that run already. Returns the answer of each, in order."""
    engine.add(*requests)
    run(engine)
    assert {one.finish_reason for one in requests} == {"length"}
    return [one.output.tolist() for one in requests]


NUM_NEW = 6  # tokens of most answers


def text(length: int, seed: int) -> list[int]:
    """Returns random tokens."""
    rng = random.Random(seed)
    return [rng.randrange(3, VOCABULARY) for _ in range(length)]


PROMPTS = [text(length, length) for length in (5, 8, 9, 16, 17, 33, 90)]
LONG = text(80, 0)


@cache
def reference(family: str) -> PreTrainedModel:
    """Returns the model that transformers runs alone."""
    return FAMILIES[family].model()


@cache
def _own_answers(family: str, prompts: tuple[tuple[int, ...], ...], num_new: int) -> list[list[int]]:
    return own_answers(reference(family), prompts, num_new)


def expected(family: str, prompts: Sequence[Sequence[int]], num_new: int = NUM_NEW) -> list[list[int]]:
    """Returns what transformers generates greedily, which is computed once for all tests."""
    return _own_answers(family, tuple(map(tuple, prompts)), num_new)
