"""Perplexity of a text's continuation, when all but some of the tokens before it are evicted.

    python -m bench.features.eviction --out bench/results/eviction-cpu.json

SmolLM2 reads the beginning of several topics of the language reference that CPython includes
(`pydoc_data.topics`). Then all but a budget of tokens are evicted, and the continuation is predicted in chunks,
before each of which tokens are evicted down to the budget again. Heavy hitters keeps the tokens that were
attended to most, and the latest. It is compared with keeping the latest alone, the first four and the latest,
and as many at random. No figures are reported unless the memory is right after every step.
"""

import math
from collections.abc import Callable
from pydoc_data.topics import topics
from statistics import fmean

import torch

from bench.common.report import parser, print_json, print_machine, print_table, refuse
from lightkv.integrations.cached_model import CachedModel
from lightkv.integrations.eviction import HeavyHitters, highest
from lightkv.ledger.sequence import Sequence
from lightkv.memory.exported_kv import ExportedKV
from lightkv.router.model.loader import load_model
from lightkv.router.model_files import DEFAULT_MODEL, resolve
from lightkv.router.text.tokenizer import Tokenizer

FIRST = 4  # tokens that the policy of the first and the latest keeps from the beginning
HEAVY = "heavy hitters"

Evict = Callable[[Sequence], int]  # returns how many slots it freed


def evictions(
    hitters: HeavyHitters, lm: CachedModel, budget: int, recent: int, seed: int
) -> dict[str, Evict]:
    """Returns, by the name of the policy, a function that evicts all but `budget` tokens of a sequence."""
    generator = torch.Generator().manual_seed(seed)

    def oldest(sequence: Sequence) -> int:
        return lm.cache.release(sequence, sequence.length - budget)

    def at_random(sequence: Sequence) -> int:
        scores = torch.rand(sequence.length, generator=generator)
        return lm.cache.keep(sequence, highest(scores, budget, 0))

    def first_and_latest(sequence: Sequence) -> int:
        scores = torch.zeros(sequence.length)
        scores[:FIRST] = 1.0
        return lm.cache.keep(sequence, highest(scores, budget, budget - FIRST))

    return {
        HEAVY: lambda sequence: hitters.keep(sequence, budget, recent),
        "latest": oldest,
        f"first {FIRST} and latest": first_and_latest,
        "random": at_random,
    }


class Text:
    """A text whose first `prompt` tokens are computed, and the tokens that follow."""

    def __init__(self, hitters: HeavyHitters, lm: CachedModel, ids: torch.Tensor, prompt: int) -> None:
        self._hitters = hitters
        self._lm = lm
        self._prompt = ids[:prompt].tolist()
        self._rest = ids[prompt:]
        sequence = lm.cache.open(self._prompt[:1])
        hitters.forward(sequence, self._prompt)
        self._kv: ExportedKV = lm.cache.export(sequence)
        self._scores = hitters.scores(sequence).clone()
        lm.cache.close(sequence, cache=False)

    def continuation(self, evict: Evict | None, budget: int, chunk: int, scored: bool = False) -> list[float]:
        """Returns the losses of the continuation, in nats.

        With `evict`, at most `budget` tokens are left before each chunk. `scored` counts the attention, which
        eviction by heavy hitters needs; no other call may drop tokens of the sequence then.
        """
        lm, hitters = self._lm, self._hitters
        sequence = lm.cache.import_sequence(self._prompt, self._kv)
        if scored:
            hitters.scores(sequence).copy_(self._scores)
        losses: list[float] = []
        for start in range(0, len(self._rest) - 1, chunk):
            if evict is not None:
                free, length = lm.cache.num_free, sequence.length
                freed = evict(sequence)
                if not lm.cache.num_free - free == freed == length - budget == length - sequence.length:
                    refuse(
                        f"{freed} of {length} tokens freed for a budget of {budget}, {sequence.length} left"
                    )
            targets = self._rest[start + 1 : start + chunk + 1]
            chunk_ids = self._rest[start : start + len(targets)].tolist()
            if scored:
                logits = hitters.forward(sequence, chunk_ids, all_logits=True)
            else:
                logits = lm.forward([sequence], [chunk_ids], all_logits=True)
            losses += torch.nn.functional.cross_entropy(logits, targets, reduction="none").tolist()
        lm.cache.check()
        lm.cache.close(sequence, cache=False)
        return losses


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--model", default=DEFAULT_MODEL)
    arguments.add_argument("--texts", type=int, default=8, help="the longest topics")
    arguments.add_argument("--prompt", type=int, default=1024)
    arguments.add_argument("--continuation", type=int, default=257)
    arguments.add_argument("--budgets", type=int, nargs="+", default=[512, 256, 128])
    arguments.add_argument(
        "--recent", type=float, default=0.5, help="share of the budget for the latest tokens"
    )
    arguments.add_argument("--chunk", type=int, default=32)
    options = arguments.parse_args()

    print_machine()
    directory = resolve(options.model, print)
    model = load_model(directory, torch.device("cpu"), torch.float32, print)
    tokenizer = Tokenizer(directory)
    length = options.prompt + options.continuation
    names = sorted(topics, key=lambda name: (-len(topics[name]), name))[: options.texts]
    lm = CachedModel(model, capacity=length)
    hitters = HeavyHitters(lm)

    losses: dict[str, list[float]] = {}
    for seed, name in enumerate(names):
        ids = torch.from_numpy(tokenizer.encode(topics[name])[:length]).long()
        if len(ids) < length:
            refuse(f"topic {name!r} has {len(ids)} tokens, and {length} are needed: lower --texts")
        text = Text(hitters, lm, ids, options.prompt)
        losses.setdefault("all", []).extend(text.continuation(None, 0, options.chunk))
        for budget in options.budgets:
            recent = round(budget * options.recent)
            for policy, evict in evictions(hitters, lm, budget, recent, seed).items():
                spent = text.continuation(evict, budget, options.chunk, scored=policy == HEAVY)
                losses.setdefault(f"{policy}, {budget}", []).extend(spent)
        print(f"{seed + 1} of {len(names)}: {name}", flush=True)

    perplexity = {name: math.exp(fmean(values)) for name, values in losses.items()}
    policies = list(evictions(hitters, lm, 0, 0, 0))
    rows = [["all of them", *[f"{perplexity['all']:.2f}"] * len(policies)]]
    for budget in options.budgets:
        rows.append([str(budget), *(f"{perplexity[f'{policy}, {budget}']:.2f}" for policy in policies)])
    print()
    print_table([f"tokens kept of {options.prompt}", *policies], rows)
    settings = {**vars(options), "topics": names}
    settings.pop("out")
    print_json("eviction", {"settings": settings, "perplexity": perplexity}, options.out)


if __name__ == "__main__":
    main()
