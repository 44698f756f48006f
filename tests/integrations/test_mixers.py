"""Runs tiny models of every family whose layers keep states over a cache: their texts are transformers' own,
however the tokens are cut and batched, after hits and forks. A mixer that computes anything else is refused.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from lightkv import KVCache
from lightkv.attention import Batch, Step, make_backends
from lightkv.errors import UnsupportedModel
from lightkv.integrations.cached_model import CachedModel
from lightkv.integrations.hf_cache import LightKVCache
from lightkv.integrations.model.adapters.adapt import adapt
from lightkv.integrations.model.fused_layers import fuse_layers
from lightkv.integrations.model.hf_model import bind, forward
from lightkv.integrations.model.mixers.mixer import mixers_of, require_own_mixers
from lightkv.integrations.model.probe import probe
from lightkv.ledger.sequence import Sequence
from lightkv.memory.state_passes import state_passes
from tests.support.combinations import slow
from tests.support.tiny_architectures import random_weights, tiny

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
NUM_NEW = 6  # tokens of an answer
PROMPT = [3 + 5 * idx % 90 for idx in range(37)]
KEPT = 22  # after how many of its tokens a snapshot is kept
KINDS = ["lfm2", "minimax", "nemotron_h", "qwen3_next"]  # a family of each kind of mixer
OTHERS = ["bamba", "falcon_h1", "granitemoehybrid", "lfm2_moe", "lfm3", "olmo_hybrid"]
OTHERS += ["qwen3_5_moe_text", "qwen3_5_text", "zamba2"]
FAMILIES = [
    *((name, "") for name in KINDS),
    ("falcon_h1", "mamba_rms_norm"),
    *slow(("granitemoehybrid", "no experts"), *((name, "") for name in OTHERS)),
]


def made(name: str, variant: str = "") -> PreTrainedModel:
    return random_weights(tiny(name, variant))


def own_answer(model: PreTrainedModel, ids: list[int]) -> list[int]:
    given = torch.tensor([ids])
    settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    mask = torch.ones_like(given)
    found = model.generate(given, attention_mask=mask, max_new_tokens=NUM_NEW, **settings)
    return found[0, len(ids) :].tolist()


class Bound:
    """A model of a family, bound and fused, with a cache and what transformers generates after PROMPT."""

    def __init__(self, name: str, variant: str = "") -> None:
        self.model = made(name, variant)
        self.own = own_answer(self.model, PROMPT)
        adapt(self.model)
        self.shape = probe(self.model)
        bind(self.model)
        fuse_layers(self.model, lambda line: None)
        self.cache = KVCache(self.shape.spec, 400, 8, 100, CPU, num_states=24)
        layers = make_backends(None, CPU, self.shape.layers)
        self.num_split = 0  # pieces that another piece of their sequence follows in their step
        self.backends = dict(zip(self.shape.numbers or (), layers, strict=True))

    def step(self, wanted: list[tuple[Sequence, list[int]]]) -> list[int]:
        """Computes tokens of sequences in one step, and returns the likeliest next one of each. A sequence has
        several pieces where a snapshot is within its tokens, and fewer tokens where it has to wait."""
        states = self.cache.memory.states
        assert states is not None
        prefills = [one for one in wanted if len(one[1]) > 1]
        decodes = [one for one in wanted if len(one[1]) == 1]
        rows, starts, counts, tokens, last = list[int](), list[int](), list[int](), list[int](), list[int]()
        earlier = dict[int, tuple[int, int]]()
        for sequence, ids in (*prefills, *decodes):
            start = sequence.length
            while left := start + len(ids) - sequence.length:
                if not (count := self.cache.ledger.piece(sequence, left)):
                    break  # a snapshot has to wait for the next step
                rows.append(sequence.row)
                starts.append(sequence.length)
                counts.append(count)
                self.cache.extend([sequence], [count])
                earlier[len(rows) - 1] = states.of_rows[sequence.row]
                self.cache.publish(sequence)
            tokens += ids[: sequence.length - start]
            last.append(len(tokens) - 1)
        self.num_split += len(rows) - len(wanted)
        num_prefills = len(rows) - len(decodes)
        step = Step.of(Batch.of(rows, starts, counts, num_prefills), self.cache.memory)
        step = replace(step, states=state_passes(states, rows, counts, num_prefills, earlier))
        with torch.inference_mode():
            ids = torch.tensor(tokens)
            found = forward(self.model, ids, step, self.backends, torch.tensor(last)).argmax(-1).tolist()
        self.cache.confirm()
        self.cache.check()
        by_sequence = dict(zip((id(one) for one, _ in (*prefills, *decodes)), found, strict=True))
        return [by_sequence[id(one)] for one, _ in wanted]

    def answers(self, sequences: list[Sequence], ids: list[list[int]], chunks: list[int]) -> list[list[int]]:
        """Returns what is generated after the `ids` of sequences, in chunks of so many tokens of each."""
        known = [list(one) for one in ids]
        lengths = [len(one) + NUM_NEW for one in ids]
        while todo := [idx for idx, one in enumerate(known) if len(one) < lengths[idx]]:
            wanted = []
            for idx in todo:
                start = sequences[idx].length
                wanted.append((sequences[idx], known[idx][start : start + chunks[idx]]))
            for idx, token in zip(todo, self.step(wanted), strict=True):
                if sequences[idx].length == len(known[idx]):
                    known[idx].append(token)
        return [one[len(given) :] for one, given in zip(known, ids, strict=True)]


@pytest.mark.parametrize("family", FAMILIES, ids="-".join)
def test_texts_are_those_of_transformers(family: tuple[str, str]) -> None:
    bound = Bound(*family)
    cache, chunks = bound.cache, [40, 13, 2]
    rows = [cache.open(PROMPT, (chunk,), keep_at=[KEPT]) for chunk in chunks]
    assert bound.answers(rows, [PROMPT] * 3, chunks) == [bound.own] * 3
    assert bound.num_split
    hit = cache.open(PROMPT, (chunks[0],))
    assert hit.num_hit == KEPT
    assert bound.answers([hit], [PROMPT], [40]) == [bound.own]
    parent = cache.open(PROMPT, ("fork",))
    bound.step([(parent, PROMPT)])
    fork = cache.fork(parent)
    others = [[*PROMPT, bound.own[0]], [*PROMPT, 50]]
    wanted = [own_answer(made(*family), one) for one in others]
    assert bound.answers([parent, fork], others, [1, 1]) == wanted


@pytest.mark.parametrize("name", KINDS)
def test_a_mixer_whose_numbers_are_not_the_models_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's own code computes with another parameter than its mixer, one after the other."""
    model = made(name)
    require_own_mixers(model)
    module = mixers_of(model)[0].module
    own = type(module).forward
    unread = {"key_decay", "query_decay", "slope_rate"}  # by a text as short as this one
    numbers = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name in numbers.keys() - unread:
        number = numbers[name]

        def changed(self: Any, *args: Any, number: Tensor = number) -> Any:
            before = number.data.clone()
            number.data.mul_(2).add_(0.5)
            try:
                return own(self, *args)
            finally:
                number.data.copy_(before)

        monkeypatch.setattr(type(module), "forward", changed)
        with pytest.raises(UnsupportedModel, match=f"its {type(module).__name__} differs from its own code"):
            require_own_mixers(model)


def test_a_mixer_in_other_pieces_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state that is not read shows in the pieces after the first."""
    model = made("nemotron_h")
    mixer = type(mixers_of(model)[0])
    own = mixer.forward

    def without_states(self: Any, x: Tensor, passes: Any, state: dict[str, Tensor]) -> Tensor:
        passes = [replace(one, slots=one.slots._replace(reads=one.slots.reads * 0)) for one in passes]
        return own(self, x, passes, state)

    monkeypatch.setattr(mixer, "forward", without_states)
    with pytest.raises(UnsupportedModel, match=r"a text in pieces of \(5, 1, 1, 70, 19\)"):
        require_own_mixers(model)


def test_caches_without_room_for_states_refuse_the_model() -> None:
    model = made("lfm2")
    for make in (CachedModel, LightKVCache):
        with pytest.raises(UnsupportedModel, match="its layers keep states beside K/V"):
            make(model, 100)
