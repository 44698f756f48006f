"""Several answers to one prompt: samples side by side, and beam search.

The prompt is computed once. Sequences share the slots of the tokens that they have in common: a fork copies
indices and no K/V, and the slots that only a dropped beam held are free in the same step.

>>> import torch
>>> from transformers import LlamaConfig, LlamaForCausalLM
>>> from lightkv.integrations.cached_model import CachedModel
>>> from lightkv.integrations.sampling import beam_search, sample_parallel
>>> config = LlamaConfig(vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
...                      num_attention_heads=4, num_key_value_heads=2)
>>> lm = CachedModel(LlamaForCausalLM(config).eval(), capacity=200)
>>> best, *others = beam_search(lm, [5, 6, 7, 8], num_beams=4, max_new_tokens=6)
>>> len(best.token_ids), len(others), best.score > others[-1].score
(6, 3, True)
>>> answers = sample_parallel(lm, [5, 6, 7, 8], num_samples=3, max_new_tokens=6, temperature=0.8)
>>> [len(ids) for ids in answers]
[6, 6, 6]
"""

from collections.abc import Collection
from typing import Literal, NamedTuple

import torch

from lightkv.token_ids import TokenIds

from .cached_model import CachedModel, select


class Beam(NamedTuple):
    """A result of beam search: the generated ids, the end token included, and their score.

    The score is the sum of their log probabilities over length ** length_penalty.
    """

    token_ids: list[int]
    score: float


@torch.no_grad()
def sample_parallel(
    lm: CachedModel,
    prompt: TokenIds,
    num_samples: int,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    eos_token_ids: Collection[int] = (),
    generator: torch.Generator | None = None,
) -> list[list[int]]:
    """Returns `num_samples` independent answers: the generated ids, up to an end token or `max_new_tokens`.

    `generator` is on the model's device. Raises the errors of `CachedModel.prefill` and `forward`, OutOfRows
    and ValueError.
    """
    if num_samples < 1 or max_new_tokens < 1 or temperature <= 0:
        raise ValueError(
            f"{num_samples} samples of {max_new_tokens} tokens at temperature {temperature}: all three have to "
            "be above 0"
        )
    first, logits = lm.prefill(prompt)
    sequences = [first]
    answers: list[list[int]] = [[] for _ in range(num_samples)]
    running = list(range(num_samples))  # the index of the answer that each sequence belongs to
    try:
        sequences = select(lm.cache, sequences, [0] * num_samples)
        rows = logits.expand(num_samples, -1)
        while True:
            probabilities = (rows.float() / temperature).softmax(-1)
            drawn = torch.multinomial(probabilities, 1, generator=generator).flatten().tolist()
            for idx, token in zip(running, drawn, strict=True):
                answers[idx].append(token)
            is_finished = [
                token in eos_token_ids or len(answers[idx]) == max_new_tokens
                for idx, token in zip(running, drawn, strict=True)
            ]
            for place in reversed(range(len(is_finished))):
                if is_finished[place]:
                    lm.cache.close(sequences.pop(place), answers[running.pop(place)])
            if not running:
                return answers
            rows = lm.decode(sequences, [answers[idx][-1] for idx in running])
    finally:
        for sequence, idx in zip(sequences, running, strict=False):
            lm.cache.close(sequence, answers[idx])


@torch.no_grad()
def beam_search(
    lm: CachedModel,
    prompt: TokenIds,
    num_beams: int,
    max_new_tokens: int,
    *,
    eos_token_ids: Collection[int] = (),
    length_penalty: float = 1.0,
    early_stopping: bool | Literal["never"] = False,
) -> list[Beam]:
    """Returns the `num_beams` best continuations, the best first, as transformers' beam search does.

    With early_stopping True the search ends with `num_beams` finished beams. With False it ends once no running
    beam would beat the worst of them at its present length; with "never", at the length that would score best.
    Raises the errors of `CachedModel.prefill` and `forward`, OutOfRows and ValueError.
    """
    # Enough that `num_beams` candidates continue, even if the best continuations of every beam end.
    num_candidates = max(2, 1 + len(eos_token_ids)) * num_beams
    first, logits = lm.prefill(prompt)
    sequences = [first]
    generated: list[list[int]] = [[]]  # of each sequence
    try:
        vocabulary = len(logits)
        if not 1 <= num_candidates <= vocabulary or max_new_tokens < 1:
            raise ValueError(
                f"{num_beams} beams of {max_new_tokens} tokens compare {num_candidates} candidates a step, "
                f"with a vocabulary of {vocabulary}: all have to be above 0, and the vocabulary large enough"
            )
        scores = logits.new_zeros(1, dtype=torch.float32)
        rows = logits[None]
        finished: list[Beam] = []
        for length in range(1, max_new_tokens + 1):
            totals = rows.float().log_softmax(-1) + scores[:, None]
            best, where = totals.flatten().topk(num_candidates)
            final = (best / length**length_penalty).tolist()
            parents, tokens = (where // vocabulary).tolist(), (where % vocabulary).tolist()
            ends = [token in eos_token_ids or length == max_new_tokens for token in tokens]
            # A candidate that ends counts only if it is among the best `num_beams`; the others may continue.
            finished += [
                Beam([*generated[parents[rank]], tokens[rank]], final[rank])
                for rank in range(num_beams)
                if ends[rank]
            ]
            finished = sorted(finished, key=lambda beam: -beam.score)[:num_beams]
            kept = [rank for rank in range(num_candidates) if not ends[rank]][:num_beams]
            if not kept:
                break
            if len(finished) == num_beams:
                best_length = max_new_tokens if early_stopping == "never" and length_penalty > 0 else length
                if (
                    early_stopping is True
                    or best[kept[0]] / best_length**length_penalty <= finished[-1].score
                ):
                    break
            sequences = select(lm.cache, sequences, [parents[rank] for rank in kept])
            generated = [[*generated[parents[rank]], tokens[rank]] for rank in kept]
            scores = best[kept]
            rows = lm.decode(sequences, [ids[-1] for ids in generated])
        return finished
    finally:
        for sequence, ids in zip(sequences, generated, strict=True):
            lm.cache.close(sequence, ids)
