"""The benchmarks of prefixes and branches by pages, end to end, and their page table against the ledger."""

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.memory import branches, hybrid_blocks, prefix_pages
from bench.memory.branches import ByPages, ByToken
from bench.memory.prefix_pages import Turn
from lightkv.errors import CheckFailed
from lightkv.router.simulate.paged_ledger import make_ledger
from tests.support.served import save_tiny_model


def ids(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


# --------------------------------------------------------------------------------
# Prefixes


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs a benchmark's `main` with these options, and returns its results."""

    def run_main(main: Callable[[], None], *options: object) -> Any:
        out = tmp_path / "out.json"
        monkeypatch.setattr(sys, "argv", ["bench", *map(str, [*options, "--out", out])])
        main()
        return json.loads(out.read_text())["results"]

    return run_main


def test_prefix_pages(run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_tiny_model(tmp_path / "tiny")
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    results = run(prefix_pages.main, "--model", model, "--chats", 12, "--at-once", 4, "--running", 3)
    for pool in results["pools"].values():
        found = [own["found"] for own in pool["allocations"].values()]
        assert found == sorted(found, reverse=True)
        assert 0 < found[-1] < found[0]
        for own in pool["allocations"].values():
            assert own["found"] + own["computed"] == own["prompt_tokens"]
            assert own["cached"] <= pool["capacity"]
    assert results["pools"]["ample"]["capacity"] > results["pools"]["tight"]["capacity"]


def test_a_history_is_found_to_the_token_or_to_the_page() -> None:
    first = Turn(np.arange(1, 21, dtype=np.int32), ids(31, 32, 33, 34))
    again = Turn(np.concatenate((first.prompt, first.answer, ids(41, 42))), ids(51))
    found = {
        allocation: prefix_pages.replay(make_ledger(allocation, 256, 1, 64, 0), [first, again], 1)["found"]
        for allocation in ("token", "paged:16", "paged:64")
    }
    assert found == {"token": 23, "paged:16": 16, "paged:64": 0}  # the last token of an answer has no slot


def test_turns_of_a_chat_come_in_their_order() -> None:
    chats = [[Turn(ids(chat, turn), ids(0)) for turn in range(4)] for chat in range(6)]
    turns = list(prefix_pages.interleaved(chats, 3, random.Random(1)))
    assert len(turns) == 24
    for chat in range(6):
        assert [turn.prompt[1] for turn in turns if turn.prompt[0] == chat] == [0, 1, 2, 3]
    assert [int(turn.prompt[0]) for turn in turns] != sorted(int(turn.prompt[0]) for turn in turns)


# --------------------------------------------------------------------------------
# Branches


def test_branches(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    parents = [[0, 0, 1, 2], [3, 3, 0, 0], [1, 1, 1, 1]]
    monkeypatch.setattr(branches, "searches", lambda *arguments: [(7, parents)])
    monkeypatch.setattr(branches, "POOL", 2048)
    results = run(branches.main, "--prompts", 3, "--beams", 4, "--samples", 1, 3, "--guesses", 4)
    assert results["branches"].keys() == {
        "1 samples", "3 samples", "4 beams", "4 beams, long prompt", "4 guesses", "tree 4 x 4",
    }  # fmt: skip
    for name, by in results["branches"].items():
        assert by["token"]["copied"] == 0
        assert 0 == by["token"]["more"] < by["paged:16"]["more"] < by["paged:64"]["more"]
        assert len({own["tokens"] for own in by.values()}) == 1
        assert (by["paged:16"]["copied"] > 0) == (name not in ("1 samples", "4 guesses"))
    fits = list(results["short_chats_that_fit"].values())
    assert fits == sorted(fits, reverse=True)


def test_pages_of_one_token_hold_what_the_ledger_holds() -> None:
    rng = random.Random(2)
    sides = ByToken(), ByPages(1)
    live: list[list[int]] = [[], []]
    for _ in range(400):
        verb, pick, count = (
            rng.choice(("open", "extend", "fork", "truncate", "close")),
            rng.random(),
            rng.randint(1, 9),
        )
        for side, own in zip(sides, live, strict=True):
            if verb == "open" or not own:
                own.append(side.open(count))
                continue
            idx = int(pick * len(own))
            if verb == "extend":
                side.extend([own[idx]], count)
            elif verb == "fork":
                own.append(side.fork(own[idx]))
            elif verb == "truncate":
                side.truncate(own[idx], max(side.length(own[idx]) - count, 1))
            else:
                side.close(own.pop(idx))
        assert sides[0].num_held == sides[1].num_held
    for side in sides:
        side.check()
    assert sides[1].copied == 0


def test_a_page_that_others_hold_is_copied_before_a_write() -> None:
    memory = ByPages(16)
    first = memory.open(20)
    second = memory.fork(first)
    assert memory.num_held == 32
    memory.extend([first, second], 1)
    assert (memory.num_held, memory.copied) == (48, 4)  # the last to write has the page for itself
    memory.extend([first, second], 1)
    assert (memory.num_held, memory.copied) == (48, 4)
    memory.truncate(second, 16)
    assert memory.num_held == 32
    memory.close(first)
    assert memory.num_held == 16
    memory.check()
    memory._holders[-1] = 1
    with pytest.raises(CheckFailed):
        memory.check()


def test_slots_that_are_never_freed_are_an_error() -> None:
    memory = ByToken()
    memory.open(5)
    with pytest.raises(CheckFailed, match="5 slots are held without a sequence"):
        branches.Steps(memory).end()


# --------------------------------------------------------------------------------
# Layers with windows


def test_hybrid_blocks(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hybrid_blocks, "LENGTHS", (1100,))
    monkeypatch.setattr(hybrid_blocks, "STEPS", 40)
    monkeypatch.setattr(hybrid_blocks, "TURNS", 3)
    monkeypatch.setattr(hybrid_blocks, "ANSWERED", (20, 40))
    found = run(hybrid_blocks.main, "--shapes", "gpt-oss-20b", "--conversations", 16)["shapes"]["gpt-oss-20b"]
    short = {side: own["prefill_bytes"] for side, own in found["held"]["12"].items()}
    row = 2 * 8 * 64 * 2 * 12  # bytes of a token in a group of 12 layers; there are two groups
    assert short == {"lightkv": 24 * row} | {f"blocks of {n}": 2 * n * row for n in (16, 64, 528)}
    assert found["bytes_of_12_tokens_in_all_layers"] == 24 * row
    for own in found["held"]["1100"].values():
        assert own["first_decode_share"] < own["prefill_share"] < 1.5
    for room in found["turns"]["computed_ratio"].values():
        assert min(room.values()) >= 1
        assert room["lightkv"] < room["blocks of 16"] < room["blocks of 64"] < room["blocks of 528"]
