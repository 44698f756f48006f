"""Trees of guesses: their shape, and that a pass over a tree computes what passes over its lines do."""

import doctest

import pytest
import torch

from lightkv.integrations import guess_tree
from lightkv.integrations.cached_model import CachedModel
from lightkv.integrations.guess_tree import GuessTree
from lightkv.integrations.prompt_lookup import PromptLookup, generate
from tests.support.tiny_models import tiny_llama

VOCABULARY = 23  # so few that runs repeat by chance
PROMPTS = [[5, 6, 5, 7, 5, 6, 8, 5], list(range(20)) * 2, [3, 1, 4, 1, 5, 9, 2, 6, 1, 3, 1, 4, 2, 1, 4]]


def test_the_example_in_the_docstring_runs() -> None:
    result = doctest.testmod(guess_tree)
    assert result.attempted > 2
    assert not result.failed


def test_no_more_nodes_than_there_is_room_for() -> None:
    tree = GuessTree.of_lines(0, [[1, 2], [1, 3, 4]], most=4)
    assert tree.tokens == [0, 1, 2, 3]
    assert not tree.is_line
    assert GuessTree.of_lines(0, [[1, 2]]).is_line


def test_bits_of_more_nodes_than_a_word_has() -> None:
    tree = GuessTree.of_lines(0, [range(1, 70), [1, 99]])
    bits = tree.bits()
    assert bits.shape == (71, 2)
    assert bits[69].tolist() == [-1, 2**6 - 1]  # all 70 nodes of the line
    assert bits[70].tolist() == [3, 2**6]


def test_the_latest_lines_of_the_longest_run_are_proposed_first() -> None:
    lookup = PromptLookup([1, 2, 3, 9, 2, 4, 1, 2, 5, 1, 2], 1, 2, most_places=3)
    assert lookup.propose_lines(2, 9) == [[5, 1], [3, 9], [4, 1]]
    assert lookup.propose_lines(1, 2) == [[5], [3]]


@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=pytest.mark.slow)])
def test_a_tree_has_the_logits_of_its_lines(backend: str, device: torch.device) -> None:
    lines = [[1, 2, 3], [1, 2, 4, 6], [5, 1]]
    lm = CachedModel(tiny_llama(device, 0, vocabulary=VOCABULARY), 200, backend=backend)
    sequence, _ = lm.prefill(PROMPTS[1])
    tree = GuessTree.of_lines(7, lines)
    start = sequence.length
    found = lm.forward([sequence], [tree.tokens], all_logits=True, tree=tree)
    path = [0, 1, 2, 4, 5]  # of the second line
    lm.take(sequence, start, path)
    after = lm.forward([sequence], [[8]])
    for line in lines:
        other, _ = lm.prefill(PROMPTS[1])
        expected = lm.forward([other], [[7, *line]], all_logits=True)
        nodes = [0]
        for token in line:
            children = zip(tree.tokens, tree.parents, strict=True)
            nodes.append(next(i for i, child in enumerate(children) if child == (token, nodes[-1])))
        torch.testing.assert_close(found[nodes], expected, atol=1e-4, rtol=1e-4)
        if line == lines[1]:
            torch.testing.assert_close(lm.forward([other], [[8]]), after, atol=1e-4, rtol=1e-4)


def test_a_tree_after_dropped_tokens_is_at_true_positions(device: torch.device) -> None:
    lm = CachedModel(tiny_llama(device, 0, vocabulary=VOCABULARY), 200, backend="torch")
    tree = GuessTree.of_lines(7, [[1, 2, 3]])  # a line, computed as a tree and as a line
    found = []
    for given in (tree, None):
        sequence = lm.cache.open(PROMPTS[1])
        lm.forward([sequence], [PROMPTS[1]])
        lm.cache.release(sequence, 6)
        found.append(lm.forward([sequence], [tree.tokens], all_logits=True, tree=given))
        lm.cache.close(sequence, cache=False)
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("num_lines", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_the_output_is_that_of_greedy_decoding(num_lines: int, device: torch.device) -> None:
    num_forwards = {1: 0, num_lines: 0}
    for seed, prompt in enumerate(PROMPTS):
        lm = CachedModel(tiny_llama(device, seed, vocabulary=VOCABULARY), 300)
        expected = generate(lm, prompt, 40, num_proposed=0).token_ids
        for lines in num_forwards:
            lm = CachedModel(tiny_llama(device, seed, vocabulary=VOCABULARY), 300)
            found = generate(lm, prompt, 40, num_proposed=5, shortest_run=1, num_lines=lines)
            assert found.token_ids == expected
            assert len(expected) == found.num_forwards + found.num_accepted
            num_forwards[lines] += found.num_forwards
            lm.cache.check()
            assert lm.cache.num_held == 0
    assert num_forwards[num_lines] <= num_forwards[1]


def test_lines_are_one_or_more(device: torch.device) -> None:
    lm = CachedModel(tiny_llama(device, 0, vocabulary=VOCABULARY), 50)
    with pytest.raises(ValueError, match="0 lines of guesses"):
        generate(lm, [5], 3, num_lines=0)
