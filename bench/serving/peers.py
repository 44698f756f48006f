"""Compares the service with `LLM.generate` in this process and transformers' continuous batching in a child.

Each runs the same model on the service's batches, with all requests of a batch at once, and decodes greedily to
the full lengths.
"""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.common.report import Spread, refuse
from bench.serving.continuous_batching import WAYS, Answered, Batches, Run, run_way
from bench.serving.workload import Ask
from lightkv.router import LLM, EngineConfig, SamplingParams
from lightkv.router.model.sizes import pick_device
from lightkv.router.model_files import resolve
from lightkv.router.text.tokenizer import Tokenizer

Results = dict[str, Any]
Serve = Callable[[Sequence[Ask]], tuple[float, list[str]]]  # returns seconds, and the texts in order

LAST_WAY = "eager"  # tried if no other way has figures
LEAST_SAME = 0.9  # the share of equal texts in float32: a near tie of two logits may be resolved either way


class InProcess:
    """Runs `LLM.generate`. Raises what `LLM` raises."""

    def __init__(self, config: EngineConfig) -> None:
        self.llm = LLM(config)

    def run(self, asks: Sequence[Ask]) -> tuple[float, list[str]]:
        """Returns the seconds and the texts."""
        params = [SamplingParams(temperature=0, max_tokens=ask.num_output, ignore_eos=True) for ask in asks]
        begun = time.perf_counter()
        outputs = self.llm.generate([ask.prompt_ids for ask in asks], params)
        seconds = time.perf_counter() - begun
        self.llm.check()
        return seconds, [output.outputs[0].text for output in outputs]

    def close(self) -> None:
        """Frees its memory, on the device too."""
        del self.llm
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


@dataclass
class Rounds:
    """The figures of each round for batches of one size.

    `http`, `in_process`, `transformers`: tokens per second of each side. `same_text`: the share of texts that
    the service and `LLM.generate` have in common. `texts`: the service's. `way`: the fastest way of
    transformers.
    """

    http: list[float]
    in_process: list[float]
    transformers: list[float]
    same_text: list[float]
    texts: list[list[str]]
    way: str | None = None

    def results(self) -> Results:
        found: Results = {"http_tokens_per_s": Spread.of(self.http)._asdict()}
        for name, peer in (("in_process", self.in_process), ("transformers", self.transformers)):
            if peer:  # its last rounds may be missing
                ratios = [ours / theirs for ours, theirs in zip(self.http, peer, strict=False)]
                found[f"{name}_tokens_per_s"] = Spread.of(peer)._asdict()
                found[f"http_over_{name}"] = Spread.of(ratios)._asdict()
        if self.way is not None:
            found["transformers_way"] = self.way
        if self.same_text:
            found["same_text"] = min(self.same_text)
        return found


def run_batches(serve: Serve, in_process: InProcess | None, asked: Sequence[Sequence[Ask]]) -> Rounds:
    """Runs the service, alternated with `LLM.generate`. The first batch warms up and does not count."""
    rounds = Rounds([], [], [], [], [])
    for round_idx, asks in enumerate(asked):
        num_tokens = sum(ask.num_output for ask in asks)
        in_process_first = in_process is not None and round_idx % 2
        if in_process is not None and in_process_first:
            seconds, own = in_process.run(asks)
        http_seconds, texts = serve(asks)
        if in_process is not None and not in_process_first:
            seconds, own = in_process.run(asks)
        if not round_idx:
            continue
        rounds.http.append(num_tokens / http_seconds)
        rounds.texts.append(texts)
        if in_process is not None:
            rounds.in_process.append(num_tokens / seconds)
            same = _same_text(texts, own)
            rounds.same_text.append(same)
            if same < LEAST_SAME and in_process.llm.info.dtype == "float32":
                refuse(f"{len(asks)} at once: only {same:.0%} of the texts are those of LLM.generate")
    return rounds


def run_transformers(
    config: EngineConfig,
    asked: Batches,
    rounds: dict[int, Rounds],
    ways: Sequence[str],
    seconds: float,
    save: Callable[[Results], None],
) -> str:
    """Runs every way, for `seconds` each, and puts the fastest at each size of batch into `rounds`.

    After each way `save` gets the results so far, with the error of a way that failed. Returns a message that
    names the sizes without figures; it is empty if there are none.
    """
    decode = Tokenizer(Path(resolve(config.model, print))).decode
    is_exact = config.dtype == "float32" or (
        config.dtype == "auto" and pick_device(config.device).type == "cpu"
    )
    found: Results = {}
    missing = list(asked)
    for name in [*ways, *(() if LAST_WAY in ways else (LAST_WAY,))]:
        sizes = asked if name in ways else missing
        if not sizes:
            break
        run = run_way(name, config, {num: asked[num] for num in sizes}, seconds)
        found[name] = _way_results(name, run, asked, rounds, decode, is_exact)
        print(f"transformers, {name}: {found[name]['error'] or 'measured'}", flush=True)
        save(found)
        missing = [num for num, own in rounds.items() if not own.transformers]
    if not missing:
        return ""
    return f"no figures for {', '.join(map(str, missing))} at once; the results hold the errors"


def _way_results(
    name: str,
    run: Run,
    asked: Batches,
    rounds: dict[int, Rounds],
    decode: Callable[[list[int]], str],
    is_exact: bool,
) -> Results:
    results: Results = {**WAYS[name]._asdict(), "error": run.error, "batches": {}}
    for num, (_, *answered) in run.batches.items():  # the first batch warmed up
        if not answered:
            continue
        speeds = [_speed(asks, own) for asks, own in zip(asked[num][1:], answered, strict=False)]
        pairs = [
            (ours, [decode(ids) for ids in own.tokens])
            for ours, own in zip(rounds[num].texts, answered, strict=False)
        ]
        same = min(_same_text(*pair) for pair in pairs)
        results["batches"][num] = {
            "tokens_per_s": Spread.of(speeds)._asdict(),
            "rounds": len(speeds),
            "same_text": same,
            "same_beginning": min(_same_beginning(*pair) for pair in pairs),
        }
        if is_exact and same < LEAST_SAME:
            results["error"] = f"{num} at once: only {same:.0%} of its texts are the service's"
            continue
        best = rounds[num].transformers
        if not best or Spread.of(speeds).median > Spread.of(best).median:
            best[:] = speeds
            rounds[num].way = name
    return results


def _speed(asks: Sequence[Ask], answered: Answered) -> float:
    return sum(ask.num_output for ask in asks) / answered.seconds


def _same_text(ours: Sequence[str], theirs: Sequence[str]) -> float:
    """Returns the share of requests with the same text."""
    return sum(a == b for a, b in zip(ours, theirs, strict=True)) / len(ours)


def _same_beginning(ours: Sequence[str], theirs: Sequence[str]) -> float:
    """Returns the mean share of a text before the first difference.

    In 16 bits two ways to compute the same logits differ sooner or later, and then the texts differ to the end.
    """
    shares = []
    for pair in zip(ours, theirs, strict=True):
        length = max(map(len, pair))
        same = next((i for i, (a, b) in enumerate(zip(*pair, strict=False)) if a != b), min(map(len, pair)))
        shares.append(same / length if length else 1.0)
    return sum(shares) / len(shares)
