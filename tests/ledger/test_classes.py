"""The classes of layers, each beside a twin that counts what queries see position by position."""

import random
from collections.abc import Callable

import pytest

from lightkv.classes.all import NEVER, All
from lightkv.classes.chunk import Chunk
from lightkv.classes.window import Window
from lightkv.layer_groups import FULL, SLACK, LayerGroups, Lifetime, Rule
from tests.ledger import test_layer_groups as lives

SIZES = [1, 2, 3, 7, 16, 63, 64, 65]
LONGEST = 300

SEES: dict[str, Callable[[int, int], list[int]]] = {
    "full": lambda size, query: list(range(query + 1)),
    "window": lambda size, query: [one for one in range(query + 1) if query - one < size],
    "chunk": lambda size, query: [one for one in range(query + 1) if one // size == query // size],
}
CASES = [("full", 0), *[(sees, size) for sees in ("window", "chunk") for size in SIZES]]


@pytest.mark.parametrize(("sees", "size"), CASES)
def test_a_class_answers_what_its_twin_counts(sees: str, size: int) -> None:
    lifetime = Lifetime(sees, size)  # type: ignore[arg-type]
    one: Rule = lifetime.rule
    assert type(one) is {"full": All, "window": Window, "chunk": Chunk}[sees]
    slack = min(SLACK, size)
    first_seen = [min(SEES[sees](size, query)) for query in range(LONGEST)]
    # A sequence that grows to `length` may have gone back by `slack` before.
    kept = [min(first_seen[max(length - slack, 0) : length + 1]) for length in range(LONGEST)]
    for at in range(LONGEST):
        assert one.first_seen(at) == first_seen[at]
        assert one.first_kept(at) == kept[at]
        assert one.boundary(at) == max(query for query in range(at + 1) if first_seen[query] == query)
        gone = [length for length in range(LONGEST) if kept[length] > at]
        assert one.gone_at(at) == gone[0] if gone else one.gone_at(at) >= min(LONGEST, NEVER)
        for chunk in (1, 9):
            assert min(at, at - kept[at] + chunk) <= lifetime.most_kept(at, chunk) <= at
    passing = {after - before for before, after in zip(kept[2 * size :], kept[2 * size + 1 :], strict=False)}
    assert one.reuses == (sees == "window" and passing == {1})


@pytest.mark.parametrize("sees", ["window", "chunk"])
@pytest.mark.parametrize("size", [1, 5, 20])
def test_no_sequence_holds_more_than_its_class_says(sees: str, size: int) -> None:
    """A prompt hits a tail, is computed in chunks, and decodes."""
    groups = lives.groups_of(("full", 0, 1), (sees, size, 1))
    life = lives.Life(groups, 2000)
    first = life.open([1] * 60)
    life.finish_prompt(first)
    life.close(first)
    text = life.open([*[1] * 60, *range(2, 42)])
    while text.sequence.length < text.prompt:
        life.extend((text, 10))
        life.publish(text)
        (row,) = life.ledger.holdings().rows
        (window,) = row.windows
        assert text.sequence.length - window.start <= groups.classes[1].lifetime.most_kept(100, 10)
    life.decode(text, 15)
    assert life.ledger.num_held <= groups.most_slots(text.sequence.length, 10)


def random_groups(rng: random.Random) -> LayerGroups:
    """Returns one to three classes beside the one that sees everything, of two to eight groups in all."""
    classes = [("full", 0, rng.randrange(1, 3))]
    sizes = rng.sample([*range(1, 12), 16, 24, 32, 48, 64], rng.randrange(1, 4))
    classes += [(rng.choice(["window", "chunk"]), size, rng.randrange(1, 3)) for size in sizes]
    return lives.groups_of(*classes)


@pytest.mark.parametrize("seed", range(6))
def test_random_lives_of_random_classes(seed: int) -> None:
    rng = random.Random(seed)
    groups = random_groups(rng)
    assert groups.classes[0].lifetime == FULL
    lives.live(groups, rng, 150)


@pytest.mark.parametrize("seed", range(3))
def test_what_failed_steps_wrote_is_never_read_in_random_classes(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = random_groups(random.Random(seed))
    monkeypatch.setattr(lives, "GROUPS", {"random": groups})
    lives.test_what_failed_steps_wrote_is_never_read("random", seed)
