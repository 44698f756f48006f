"""Tests of models that count positions in a way of their own (`integrations/model/token_positions.py`)."""

from typing import Any

import pytest
import torch

from lightkv.errors import UnsupportedModel
from lightkv.integrations.cached_model import CachedModel
from lightkv.integrations.hf_cache import LightKVCache
from lightkv.integrations.model import token_positions
from lightkv.integrations.model.context import context_length
from lightkv.integrations.model.hf_model import bound
from lightkv.integrations.model.probe import probe
from lightkv.router import EngineConfig, InvalidConfig
from lightkv.router.model.build import assemble
from tests.support.tiny_architectures import NUM_NEW, own_answers, prompts, random_weights, tiny

pytestmark = pytest.mark.usefixtures("one_thread")

# RoBERTa counts from the padding token's id plus 1, and is given positions. BART counts from 0, and takes none.
CASES = {"roberta": ("roberta", "is_decoder", {"pad_token_id": 5}), "bart": ("bart", "", {})}


def make(case: str, **changes: Any) -> Any:
    name, variant, fields = CASES[case]
    return random_weights(tiny(name, variant, fields | changes))


@pytest.mark.parametrize("case", CASES)
def test_a_users_model_runs_and_stays_as_it_was(case: str) -> None:
    expected = own_answers(make(case), prompts()[:2])
    model, ids = make(case), torch.tensor([prompts()[1]])
    before = model(ids, use_cache=False).logits
    probe(model)
    with bound(model):
        pass
    assert torch.equal(model(ids, use_cache=False).logits, before)
    assert not any(module._forward_pre_hooks for module in model.modules())
    lm, found = CachedModel(model, 100), []
    for prompt in prompts()[:2]:
        sequence, logits = lm.prefill(prompt)
        text = [int(logits.argmax())]
        while len(text) < NUM_NEW:
            text.append(int(lm.decode([sequence], text[-1:])[0].argmax()))
        found.append(text)
    assert found == expected


@pytest.mark.parametrize("first", [0, 5, 7])
def test_a_wrong_first_position_is_found(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_positions, "first_position", lambda config: first)
    with pytest.raises(UnsupportedModel, match="does not count a text's positions"):
        probe(make("roberta"))


def test_embeddings_without_the_given_positions_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_positions._EmbedGiven, "__call__", lambda *args: None)
    with pytest.raises(UnsupportedModel, match="depends on the token's place in the batch"):
        probe(make("bart"))


@pytest.mark.parametrize(
    ("case", "reason"), [("roberta", "counts positions from 6"), ("bart", "takes no position_ids")]
)
def test_generate_with_a_cache_is_refused(case: str, reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        LightKVCache(make(case), 100)


def test_positions_before_the_first_are_not_part_of_the_context() -> None:
    model = make("roberta", max_position_embeddings=64)
    assert context_length(model.config) == 58
    config = EngineConfig(device="cpu", dtype="float32", max_total_tokens=100, max_num_seqs=2)
    _, info = assemble(model, config, lambda line: None)
    assert info.limits.max_model_len == 58
    with pytest.raises(InvalidConfig, match="context is 58 tokens"):
        assemble(model, EngineConfig(device="cpu", max_model_len=59), lambda line: None)
