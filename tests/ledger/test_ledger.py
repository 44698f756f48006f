"""The ledger, compared with a model of the memory that knows what every slot contains."""

import ast
import random
import subprocess
import sys
from array import array
from pathlib import Path

import pytest

from lightkv.edits import (
    Alloc,
    AllocPart,
    FreePart,
    FreeRange,
    FreeSegment,
    MapSegments,
    SplitSegment,
    StoreSegment,
    decode,
    encode,
)
from lightkv.errors import OutOfRows, OutOfTokens, SequenceTooLong
from lightkv.ledger import TokenLedger
from tests.support.combinations import slow
from tests.support.memory_model import MemoryModel


def ids(*tokens: int) -> bytes:
    return array("i", tokens).tobytes()


def counts(ledger: TokenLedger) -> tuple[int, int, int]:
    return ledger.num_free, ledger.num_cached, ledger.num_held


def run_prompt(ledger: TokenLedger, tokens: bytes, output: bytes = b"") -> None:
    sequence = ledger.open(tokens)
    ledger.extend([sequence], [(len(tokens) + len(output)) // 4 - sequence.length])
    ledger.close(sequence, output)


def test_a_second_prompt_hits_the_first_to_the_very_token() -> None:
    ledger = TokenLedger(100, 4, 50)
    first = ledger.open(ids(1, 2, 3, 4, 5))
    assert first.num_hit == 0
    ledger.extend([first], [5])
    ledger.close(first)
    assert counts(ledger) == (95, 5, 0)
    second = ledger.open(ids(1, 2, 3, 9))
    assert second.num_hit == 3
    assert counts(ledger) == (95, 2, 3)
    ledger.check()


def test_one_token_is_always_left_to_compute() -> None:
    ledger = TokenLedger(100, 4, 50)
    run_prompt(ledger, ids(1, 2, 3))
    assert ledger.open(ids(1, 2, 3)).num_hit == 2


def test_generated_ids_make_the_tail_cacheable() -> None:
    ledger = TokenLedger(100, 4, 50)
    sequence = ledger.open(ids(1, 2))
    ledger.extend([sequence], [4])
    ledger.close(sequence, ids(3, 4, 5))  # the last sampled token has no slot
    assert counts(ledger) == (96, 4, 0)
    assert ledger.open(ids(1, 2, 3, 4, 5, 6)).num_hit == 4


def test_a_tail_without_ids_is_freed() -> None:
    ledger = TokenLedger(100, 4, 50)
    sequence = ledger.open(ids(1, 2))
    ledger.extend([sequence], [4])
    ledger.close(sequence)
    assert counts(ledger) == (98, 2, 0)


def test_publish_lets_others_hit_a_running_sequence() -> None:
    ledger = TokenLedger(100, 4, 50)
    first = ledger.open(ids(1, 2, 3, 4))
    ledger.extend([first], [3])
    ledger.publish(first)
    second = ledger.open(ids(1, 2, 3, 4))
    assert second.num_hit == 3
    assert counts(ledger) == (97, 0, 3)
    ledger.extend([first], [1])
    ledger.extend([second], [1])
    ledger.publish(first)
    ledger.publish(second)  # the same token: the second's stays private
    assert (first.shared, second.shared) == (4, 3)
    ledger.close(first)
    ledger.close(second)
    assert counts(ledger) == (96, 4, 0)  # cached once, freed once
    ledger.check()


def test_chunks_grow_one_segment() -> None:
    ledger = TokenLedger(100, 4, 50)
    sequence = ledger.open(ids(*range(20)))
    for _ in range(4):
        ledger.extend([sequence], [5])
        ledger.publish(sequence)
    assert len(list(sequence.node.up())) == 1
    ledger.check()


def test_namespaces_share_nothing_and_their_roots_are_removed() -> None:
    ledger = TokenLedger(100, 4, 50)
    sequence = ledger.open(ids(1, 2, 3), namespace=("salt", 1))
    ledger.extend([sequence], [3])
    ledger.close(sequence)
    assert ledger.open(ids(1, 2, 3)).num_hit == 0
    hit = ledger.open(ids(1, 2, 3), namespace=("salt", 1))
    assert hit.num_hit == 2
    ledger.close(hit, cache=False)
    ledger.evict(ledger.num_cached)
    assert ("salt", 1) not in ledger._state.tree.roots


def test_evict_frees_the_least_recently_used_and_trims_to_the_token() -> None:
    ledger = TokenLedger(100, 4, 50)
    run_prompt(ledger, ids(1, 1, 1, 1))
    run_prompt(ledger, ids(2, 2, 2, 2))
    run_prompt(ledger, ids(1, 1, 1, 1))  # used again
    ledger.evict(5)
    assert counts(ledger) == (97, 3, 0)
    assert ledger.open(ids(2, 2, 2)).num_hit == 0
    assert ledger.open(ids(1, 1, 1, 1, 1)).num_hit == 3
    ledger.check()


def test_extend_evicts_only_as_many_tokens_as_it_needs() -> None:
    ledger = TokenLedger(10, 4, 10)
    run_prompt(ledger, ids(1, 2, 3, 4, 5, 6))
    sequence = ledger.open(ids(9))
    ledger.extend([sequence], [7])
    assert counts(ledger) == (0, 3, 7)


@pytest.mark.parametrize("extra", [1, 50])
def test_a_refused_extend_changes_nothing(extra: int) -> None:
    ledger = TokenLedger(10, 4, 1000)
    run_prompt(ledger, ids(1, 2, 3))
    held = ledger.open(ids(1, 2, 9))
    ledger.extend([held], [1])
    ledger.drain()
    before = counts(ledger)
    other = ledger.open(ids(7))
    with pytest.raises(OutOfTokens) as refused:
        ledger.extend([held, other], [4, 3 + extra])
    assert (refused.value.needed, refused.value.free, refused.value.capacity) == (7 + extra, 7, 10)
    assert counts(ledger) == before
    assert (held.length, other.length) == (3, 0)
    assert ledger.drain() == []
    ledger.check()


def test_refusals_carry_the_numbers_and_the_remedy() -> None:
    ledger = TokenLedger(10, 1, 4)
    with pytest.raises(SequenceTooLong, match="5 tokens does not fit a table row of 4"):
        ledger.open(ids(1, 2, 3, 4, 5))
    with pytest.raises(ValueError, match="at least one"):
        ledger.open(b"")
    with pytest.raises(ValueError, match="int32"):
        ledger.open(b"abc")
    sequence = ledger.open(ids(1))
    with pytest.raises(OutOfRows, match="all 1 rows"):
        ledger.open(ids(2))
    with pytest.raises(SequenceTooLong):
        ledger.extend([sequence], [5])
    with pytest.raises(ValueError, match="at least one"):
        ledger.extend([sequence], [0])
    with pytest.raises(ValueError, match="twice"):
        ledger.extend([sequence, sequence], [1, 1])
    with pytest.raises(OutOfTokens):
        ledger.evict(1)
    ledger.close(sequence)
    for verb in (lambda: ledger.close(sequence), lambda: ledger.extend([sequence], [1])):
        with pytest.raises(ValueError, match="closed"):
            verb()
    assert counts(ledger) == (10, 0, 0)
    ledger.check()


def test_retract_drops_what_failed_steps_published() -> None:
    ledger = TokenLedger(100, 8, 50)
    ledger.step = 1
    first = ledger.open(ids(1, 2, 3, 4, 5, 6))
    ledger.extend([first], [2])
    ledger.publish(first)
    ledger.confirm(1)
    ledger.step = 2
    ledger.extend([first], [4])  # grows the confirmed segment
    ledger.publish(first)
    second = ledger.open(ids(1, 2, 3, 4, 9))  # splits it beyond what is confirmed
    ledger.extend([second], [1])
    ledger.publish(second)
    with pytest.raises(ValueError, match=r"rows \[1, 2\] hold"):
        ledger.retract()
    for sequence in (first, second):
        ledger.close(sequence, cache=False)
    ledger.retract()
    assert counts(ledger) == (98, 2, 0)
    ledger.check()
    assert ledger.open(ids(1, 2, 3, 4)).num_hit == 2


def test_a_sequence_of_another_ledger_and_a_closed_one_are_refused() -> None:
    mine, other = TokenLedger(100, 4, 50), TokenLedger(100, 4, 50)
    own, foreign, closed = mine.open(ids(1, 2)), other.open(ids(1, 2)), mine.open(ids(5))
    mine.close(closed)
    mine.drain()
    for stranger in (foreign, closed):
        for batch in ([stranger], [own, stranger]):
            with pytest.raises(ValueError, match="closed, or another ledger's"):
                mine.extend(batch, [1] * len(batch))
            with pytest.raises(ValueError, match="closed, or another ledger's"):
                mine.shrink(batch, [0] * len(batch))
    assert mine.drain() == []
    for ledger in (mine, other):
        assert counts(ledger) == (100, 0, 0)
        ledger.check()


def test_shrink_undoes_an_extend_all_or_none_and_keeps_the_prompt() -> None:
    ledger = TokenLedger(100, 4, 50)
    run_prompt(ledger, ids(1, 2, 3))
    hit, fresh = ledger.open(ids(1, 2, 3, 4, 5)), ledger.open(ids(7, 8, 9))
    before = counts(ledger)
    ledger.extend([hit, fresh], [2, 3])
    ledger.drain()
    with pytest.raises(ValueError, match="cannot free 3 of 2 private tokens"):
        ledger.shrink([fresh, hit], [3, 3])
    assert ledger.drain() == []
    ledger.shrink([fresh, hit], [3, 2])
    assert ledger.drain() == [FreeRange(fresh.row, 0, 3), FreeRange(hit.row, 3, 5)]
    assert counts(ledger) == before
    assert (hit.length, hit.prompt, fresh.prompt) == (3, ids(1, 2, 3, 4, 5), ids(7, 8, 9))
    ledger.check()


def test_beams_keep_paths_short_and_a_sole_holder_gets_private_tokens() -> None:
    rng = random.Random(0)
    ledger = TokenLedger(2000, 8, 500)
    beams = [ledger.open(ids(1, 2, 3))]
    ledger.extend(beams, [3])
    ledger.publish(beams[0])
    for _ in range(3):
        beams.append(ledger.fork(beams[0]))
    for _ in range(400):
        ledger.extend(beams, [1] * 4)
        kept = [rng.choice(beams) for _ in range(4)]
        forks = [ledger.fork(beam) for beam in kept]
        for beam in beams:
            ledger.close(beam, cache=False)
        beams = forks
        assert max(len(list(beam.path())) for beam in beams) <= 1 + len(beams)
    for beam in beams[1:]:
        ledger.close(beam, cache=False)
    assert (beams[0].shared, beams[0].num_private) == (3, 400)
    ledger.check()


def test_edits_encode_to_bytes_and_back() -> None:
    edits = [Alloc((1, 2), (0, 9), (7, 1)), MapSegments(1, 0, (2**40, 3)), StoreSegment(1, 0, 4, 9)]
    edits += [SplitSegment(3, 2, 4), FreeRange(2, 0, 4), FreeSegment(3, 0), Alloc((), (), ())]
    edits += [AllocPart(6, (1, 2), (3, 4), (5, 1), (0, 4)), MapSegments(2, 9, (3, 4), 1)]
    edits += [StoreSegment(2, 0, 4, 5, 1), FreeRange(2, 0, 4, 1), FreePart(2, 5)]
    assert decode(encode(edits)) == edits
    for bad in (encode(edits)[:-8], b"\xff" * 16, encode([FreeRange(1, 2, 3)])[8:], b"abc"):
        with pytest.raises(ValueError, match=r"not an edit|bytes"):
            decode(bad)


def test_the_ledger_needs_no_torch() -> None:
    code = "import sys, lightkv; lightkv.TokenLedger(9, 1, 9); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("seed", [*range(20), *slow(*range(20, 60))])
def test_any_mix_of_verbs_keeps_the_counts_and_the_contents(seed: int) -> None:
    rng = random.Random(seed)
    capacity, rows, entries = rng.choice([(30, 3, 40), (80, 6, 60), (400, 12, 90)])
    ledger, model = TokenLedger(capacity, rows, entries), MemoryModel(capacity)
    running: dict[int, tuple[object, list[int]]] = {}
    vocabulary = rng.choice([2, 3, 50])
    families = [[rng.randrange(vocabulary) for _ in range(entries)] for _ in range(3)]

    def settle() -> None:
        model.apply(ledger.drain())
        assert len(model.free) == ledger.num_free
        model.check_owned({row: range(s.shared, s.length) for row, (s, _) in running.items()})  # type: ignore[attr-defined]
        ledger.check()

    for step in range(150):
        ledger.step = step
        verb = rng.random()
        if verb < 0.35:
            family = rng.choice(families)
            prompt = family[: rng.randint(1, entries)]
            if rng.random() < 0.5:
                prompt[rng.randrange(len(prompt))] = rng.randrange(vocabulary)
            try:
                sequence = ledger.open(ids(*prompt), (rng.randrange(2),))
            except OutOfRows:
                settle()
                continue
            running[sequence.row] = (sequence, prompt)
            model.apply(ledger.drain())
            model.read(sequence.row, prompt[: sequence.length])
        elif verb < 0.75 and running:
            chosen = rng.sample(sorted(running), rng.randint(1, len(running)))
            sequences = [running[row][0] for row in chosen]
            amounts = [rng.randint(1, rng.choice([1, 12])) for _ in chosen]
            before = counts(ledger)
            try:
                ledger.extend(sequences, amounts)  # type: ignore[arg-type]
            except (OutOfTokens, SequenceTooLong):
                assert counts(ledger) == before
                continue
            for row, amount in zip(chosen, amounts, strict=True):
                sequence, tokens = running[row]  # type: ignore[assignment]
                while len(tokens) < sequence.length:
                    tokens.append(rng.randrange(vocabulary))
                if rng.random() < 0.7:
                    ledger.publish(sequence)
                model.apply(ledger.drain())
                model.write(row, sequence.length - amount, tokens[: sequence.length])
                model.read(row, tokens[: sequence.length])
            if rng.random() < 0.8:
                ledger.confirm(step)
        elif verb < 0.95 and running:
            row = rng.choice(sorted(running))
            sequence, tokens = running.pop(row)  # type: ignore[assignment]
            num_prompt = len(sequence.prompt) // 4
            known = tokens[num_prompt : num_prompt + rng.randint(0, 60)]
            ledger.close(sequence, ids(*known), cache=rng.random() < 0.8)
        elif ledger.num_cached:
            wanted = rng.randint(1, ledger.num_cached)
            free = ledger.num_free
            ledger.evict(wanted)
            assert ledger.num_free == free + wanted
        settle()
    for sequence, _ in running.values():
        ledger.close(sequence, cache=False)  # type: ignore[arg-type]
    running.clear()
    if rng.random() < 0.5:
        ledger.retract()
    settle()
    assert ledger.num_held == 0
    ledger.evict(ledger.num_cached)
    settle()
    assert model.free == set(range(1, capacity + 1))


def test_only_the_state_writes_counts_and_edits() -> None:
    folder = Path(__file__).parents[2] / "lightkv"
    private = ("num_free", "num_cached", "_edits", "_free_rows", "_gapped", "_unconfirmed")
    wrong = []
    for file in [*folder.glob("*.py"), *(folder / "ledger").glob("*.py")]:
        if file.name in ("state.py", "snapshots.py"):  # states are counted by themselves
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            is_state = isinstance(node, ast.Attribute) and node.attr in private
            if is_state and (node.attr.startswith("_") or isinstance(node.ctx, ast.Store)):
                wrong.append(f"{file.name}:{node.lineno} {ast.unparse(node)}")
    assert not wrong
