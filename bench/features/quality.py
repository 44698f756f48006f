"""What quantised K/V costs in quality: perplexity, numbers found in a long text, and greedy texts.

    python -m bench.features.quality --out bench/results/quality-cpu.json

SmolLM2 reads the language reference that CPython includes, in chunks, through a pool of each format. Sentences
that name a number stand in the text at even depths. The perplexity is that of the text without them. Afterwards
the model is asked for each number: how probable are its digits, and is each digit the likeliest? Greedy texts
are compared with those of K/V as computed, up to the first token that differs.

Perplexities of so short a text differ by some tenths of a percent for no reason but chance. The divergence
(Kullback-Leibler, from the probabilities with K/V as computed) is steadier.

Two models are made from SmolLM2 to show what a scale for a whole layer cannot hold. In one, K heads are scaled
up or down, and the query heads that read them the other way, so that it computes the same. In the other, a
head of K has large biases in the two dims that positions rotate the least. "A layer's scale" comes from the
text that is then read, which is the best case for it.

Weights and activations are float32. No figures are reported unless K/V as computed gives the model's own
losses, and the memory is right after every step.
"""

import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pydoc_data.topics import topics
from statistics import fmean
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from bench.common.report import parser, print_json, print_machine, print_table, refuse, save_json
from bench.features.streaming import AGREEMENT, long_text
from lightkv.integrations import cached_model
from lightkv.integrations.cached_model import CachedModel
from lightkv.integrations.model.attention_call import AttentionCall
from lightkv.integrations.model.hf_model import PackedStep
from lightkv.ledger.sequence import Sequence as CachedSequence
from lightkv.router.model.loader import load_model
from lightkv.router.model_files import DEFAULT_MODEL, resolve
from lightkv.router.text.tokenizer import Tokenizer
from lightkv.triton_kernels.quantised.kv_format import AS_COMPUTED, Elements, KVFormat

PLAIN = "auto"
BFLOAT16 = "bfloat16"
OWN = {  # formats without a name of --kv-dtype, for comparison
    "int4, without Hadamard": KVFormat.parse("int4").elements._replace(has_hadamard=False),
}
NAMED = ("int8", "int8-hadamard", "int8-g8", "int4", "int4-g32")
FORMATS = (PLAIN, *NAMED, *OWN, BFLOAT16)
MADE_FORMATS = (PLAIN, "int8", "int8-hadamard", "int8-g8", "int4")
LAYER_INT8, LAYER_FP8 = "int8, a layer's scale", "fp8, a layer's scale"

CITIES = ("Paris", "Cairo", "Lima", "Oslo", "Tokyo", "Delhi", "Rome", "Quito", "Dublin", "Athens")
HEAD_FACTOR = 128.0  # each K head of the model with scaled heads is as many times larger than the one before
BIAS = 30.0  # of the biased dims, in standard deviations of K's projection
PROMPT = 128  # tokens before each greedy text

Round = Callable[[torch.Tensor, int], torch.Tensor]


class Needle(NamedTuple):
    """A sentence with a number in the text, and the question for it; token ids."""

    sentence: list[int]
    question: list[int]
    answer: list[int]


class Haystack(NamedTuple):
    """A text with needles. `is_text`: which tokens are not of a needle, bool `[n]`."""

    ids: list[int]
    is_text: torch.Tensor
    needles: list[Needle]


class Reading(NamedTuple):
    """How a haystack was read: losses in nats and the likeliest tokens, each `[n - 1]`, of all tokens but the
    first, the log-probabilities of every token in the last two chunks, `[m, vocabulary]`, and the
    log-probabilities and the count of the needles' answers."""

    losses: torch.Tensor
    likeliest: torch.Tensor
    tail: torch.Tensor
    answers: list[float]
    num_right: int
    seconds: float


@dataclass(frozen=True)
class RoundedStep(PackedStep):
    """Rounds K and V by `rounds` before they are written. Formats that no pool has are tried so.

    Each gets heads `[1, kv_heads, T, dim]`, with their positions, and the index of the layer.
    """

    rounds: tuple[Round, Round] | None = None

    def attend(self, call: AttentionCall) -> torch.Tensor:
        if self.rounds is not None:
            (k_round, v_round), call = self.rounds, call.rotated()
            layer_idx = call.module.layer_idx
            call = call._replace(k=k_round(call.k, layer_idx), v=v_round(call.v, layer_idx))
        return super().attend(call)


class Side:
    """A model over a pool of one format. `rounds`: what happens to K and V before they are written."""

    def __init__(
        self, model: Any, kv_format: KVFormat, capacity: int, rounds: tuple[Round, Round] | None = None
    ) -> None:
        self.lm = CachedModel(model, capacity, kv_format=kv_format)
        self._step = partial(RoundedStep, rounds=rounds)

    @property
    def bytes_per_token(self) -> int:
        """The bytes of a token whose K/V is computed in 16 bits."""
        return replace(self.lm.cache.memory.pool.spec, dtype=torch.bfloat16).bytes_per_token

    def forward(
        self, sequences: Sequence[CachedSequence], ids: Sequence[list[int]], all_logits: bool = False
    ) -> torch.Tensor:
        with patch.object(cached_model, "PackedStep", self._step):
            return self.lm.forward(sequences, ids, all_logits=all_logits)

    def read(self, text: Haystack, chunk: int) -> Reading:
        """Reads the text in chunks, and asks for the numbers that its needles name."""
        ids, cache = text.ids, self.lm.cache
        targets = torch.tensor(ids[1:])
        start_time = time.perf_counter()
        sequence = cache.open(ids[:1])
        losses, likeliest, answers, num_right = [], [], [], 0
        tail: list[torch.Tensor] = []
        for start in range(0, len(ids), chunk):
            logits = self.forward([sequence], [ids[start : start + chunk]], all_logits=True)
            expected = targets[start : start + chunk]
            logits = logits[: len(expected)]
            losses.append(torch.nn.functional.cross_entropy(logits, expected, reduction="none"))
            likeliest.append(logits.argmax(-1))
            tail = [*tail[-1:], logits.log_softmax(-1)]
        for needle in text.needles:
            length = sequence.length
            asked = needle.question + needle.answer[:-1]
            logits = self.forward([sequence], [asked], all_logits=True)[-len(needle.answer) :]
            digits = torch.tensor(needle.answer)
            answers.append(-float(torch.nn.functional.cross_entropy(logits, digits, reduction="sum")))
            num_right += bool((logits.argmax(-1) == digits).all())
            cache.truncate(sequence, length)
        cache.close(sequence, cache=False)
        self.check()
        seconds = time.perf_counter() - start_time
        return Reading(torch.cat(losses), torch.cat(likeliest), torch.cat(tail), answers, num_right, seconds)

    def generate(self, prompts: Sequence[list[int]], count: int) -> list[list[int]]:
        """Returns the greedy text of each prompt, `count` tokens."""
        sequences = [self.lm.cache.open(prompt[:1]) for prompt in prompts]
        texts: list[list[int]] = [[] for _ in prompts]
        ids = [list(prompt) for prompt in prompts]
        for _ in range(count):
            found = self.forward(sequences, ids).argmax(-1).tolist()
            ids = [[token] for token in found]
            for text, token in zip(texts, found, strict=True):
                text.append(token)
        for sequence in sequences:
            self.lm.cache.close(sequence, cache=False)
        self.check()
        return texts

    def check(self) -> None:
        """Exits without figures if a slot is still held."""
        self.lm.cache.check()
        if self.lm.cache.num_held:
            refuse(f"{self.lm.cache.num_held} tokens are still held")


def make_haystack(tokenizer: Tokenizer, num_tokens: int, num_needles: int) -> Haystack:
    """Returns a text of about `num_tokens` tokens, with needles at even depths."""
    needles = []
    for idx in range(num_needles):
        city = CITIES[idx % len(CITIES)] + (f" {idx // len(CITIES) + 1}" if idx >= len(CITIES) else "")
        number = (idx + 3) * 7919 % 90000 + 10000
        question = f"\n\nThe magic number of {city} is"
        whole, asked, answer = (
            tokenizer.encode(part).tolist()
            for part in (f"{question} {number}. Remember it.\n\n", question, f" {number}")
        )
        needles.append(Needle(whole, asked, answer))
    num_text = num_tokens - sum(len(needle.sentence) for needle in needles)
    text = tokenizer.encode(long_text()).tolist()
    if not 2 <= num_text <= len(text):
        refuse(f"--tokens {num_tokens}; the text has {len(text)} tokens, and the needles need some")
    parts = [(text[:num_text], True)]
    if needles:
        cuts = [num_text * idx // (num_needles + 1) for idx in range(num_needles + 2)]
        parts = [(text[: cuts[1]], True)]
        for needle, start, end in zip(needles, cuts[1:], cuts[2:], strict=False):
            parts += [(needle.sentence, False), (text[start:end], True)]
    ids = [token for part, _ in parts for token in part]
    is_text = torch.tensor([kind for part, kind in parts for _ in part])
    return Haystack(ids, is_text, needles)


def perplexity(reading: Reading, text: Haystack) -> float:
    return math.exp(float(reading.losses[text.is_text[1:]].double().mean()))


def divergence(reading: Reading, plain: Reading) -> float:
    """Returns how far the probabilities of the last two chunks are from those of `plain`, in nats."""
    return float((plain.tail.exp() * (plain.tail - reading.tail)).sum(-1).double().mean())


def agreement(texts: list[list[int]], others: list[list[int]]) -> float:
    """Returns the share of tokens before the first that differs, as a mean over the texts."""
    shares = []
    for text, other in zip(texts, others, strict=True):
        pairs = enumerate(zip(text, other, strict=True))
        shares.append(next((idx for idx, (a, b) in pairs if a != b), len(text)) / len(text))
    return fmean(shares)


def as_bfloat16(x: torch.Tensor, _: int) -> torch.Tensor:
    return x.bfloat16().to(x.dtype)


def by_layer(
    elements: Elements, largest: Mapping[int, float], x: torch.Tensor, layer_idx: int
) -> torch.Tensor:
    """Rounds x to elements with one scale for the layer."""
    scale = largest[layer_idx] / elements.largest
    x = x / scale
    x = x.to(elements.stored).to(x.dtype) if elements.is_float else x.round()
    return x * scale


def largest_by_layer(model: Any, text: Haystack, chunk: int) -> tuple[dict[int, float], dict[int, float]]:
    """Returns the largest magnitudes of K and of V in each layer while the text is read."""
    found: tuple[dict[int, float], dict[int, float]] = ({}, {})

    def note(largest: dict[int, float], x: torch.Tensor, layer_idx: int) -> torch.Tensor:
        largest[layer_idx] = max(largest.get(layer_idx, 0.0), float(x.abs().max()))
        return x

    rounds = partial(note, found[0]), partial(note, found[1])
    Side(model, AS_COMPUTED, len(text.ids) + 1, rounds).read(text, chunk)
    return found


def make_side(model: Any, name: str, capacity: int) -> Side:
    """Returns the side of a format's name, or of a comparison's."""
    if name == BFLOAT16:
        return Side(model, AS_COMPUTED, capacity, (as_bfloat16, as_bfloat16))
    kv_format = KVFormat(OWN[name]) if name in OWN else KVFormat.parse(name)
    return Side(model, kv_format, capacity)


@torch.no_grad()
def scale_heads(model: Any) -> None:
    """Scales K heads up and the query heads that read them down; the model computes the same."""
    config = model.config
    num_kv_heads = config.num_key_value_heads
    group = config.num_attention_heads // num_kv_heads
    factors = HEAD_FACTOR ** (torch.arange(num_kv_heads) - num_kv_heads // 2)
    for layer in model.model.layers:
        q, k = layer.self_attn.q_proj.weight, layer.self_attn.k_proj.weight
        k.copy_((k.unflatten(0, (num_kv_heads, -1)) * factors[:, None, None]).flatten(0, 1))
        q.copy_((q.unflatten(0, (num_kv_heads, group, -1)) / factors[:, None, None, None]).flatten(0, 2))


@torch.no_grad()
def add_biases(model: Any) -> None:
    """Gives the first K head of each layer a bias in the two dims that positions rotate the least."""
    for layer in model.model.layers:
        attention = layer.self_attn
        dim, projection = attention.head_dim, attention.k_proj
        bias = torch.zeros(len(projection.weight))
        # A normalised input has elements of about 1, so that the output's deviation is a weight row's norm.
        size = BIAS * float(projection.weight.norm(dim=1).mean())
        bias[dim // 2 - 1], bias[dim - 1] = size, -size
        projection.bias = torch.nn.Parameter(bias, requires_grad=False)


MADE: dict[str, Callable[[Any], None]] = {
    "as it is": lambda model: None,
    "K heads scaled": scale_heads,
    "K biases": add_biases,
}


def read_made(model: Any, text: Haystack, chunk: int) -> dict[str, float]:
    """Returns the perplexity of a model by format, and with one scale for each layer."""
    k_largest, v_largest = largest_by_layer(model, text, chunk)
    capacity = len(text.ids) + 1
    found = {}
    for name in MADE_FORMATS:
        found[name] = perplexity(make_side(model, name, capacity).read(text, chunk), text)
    for name, elements in ((LAYER_INT8, Elements(8)), (LAYER_FP8, Elements(8, is_float=True))):
        rounds = partial(by_layer, elements, k_largest), partial(by_layer, elements, v_largest)
        found[name] = perplexity(Side(model, AS_COMPUTED, capacity, rounds).read(text, chunk), text)
    return found


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--model", default=DEFAULT_MODEL)
    arguments.add_argument("--formats", nargs="+", default=list(FORMATS), help="as of --kv-dtype, and others")
    arguments.add_argument("--tokens", type=int, help="of the long text, default 7168")
    arguments.add_argument("--needles", type=int, help="default 8")
    arguments.add_argument("--prompts", type=int, help="of the greedy texts, default 8")
    arguments.add_argument("--new-tokens", type=int, help="of each greedy text, default 96")
    arguments.add_argument("--made-tokens", type=int, help="that the models made for it read, default 1024")
    arguments.add_argument("--chunk", type=int, default=512, help="tokens computed in one step")
    arguments.add_argument("--threads", type=int, help="of torch; default as torch chooses")
    arguments.add_argument("--quick", action="store_true", help="a short text, in about two minutes")
    options = arguments.parse_args()
    sizes = {"tokens": 7168, "needles": 8, "prompts": 8, "new_tokens": 96, "made_tokens": 1024}
    quick = {"tokens": 1024, "needles": 2, "prompts": 2, "new_tokens": 24, "made_tokens": 256}
    for name, size in (quick if options.quick else sizes).items():
        if getattr(options, name) is None:
            setattr(options, name, size)
    formats = [PLAIN, *(name for name in options.formats if name != PLAIN)]
    for name in set(formats) - {BFLOAT16, *OWN}:
        KVFormat.parse(name)

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    print_machine()
    directory = resolve(options.model, print)
    tokenizer = Tokenizer(directory)
    text = make_haystack(tokenizer, options.tokens, options.needles)
    longest = sorted(topics, key=lambda name: (-len(topics[name]), name))[: options.prompts]
    prompts = [tokenizer.encode(topics[name])[:PROMPT].tolist() for name in longest]
    load = partial(load_model, directory, torch.device("cpu"), torch.float32)
    model = load(print)
    with torch.no_grad():
        logits = model(torch.tensor([text.ids[: options.chunk]])).logits[0, :-1]
    own = torch.nn.functional.cross_entropy(
        logits, torch.tensor(text.ids[1 : options.chunk]), reduction="none"
    )

    settings = {name: getattr(options, name) for name in (*sizes, "chunk")}
    settings |= {"prompt": PROMPT, "text_sha256": hashlib.sha256(long_text().encode()).hexdigest()}
    results: dict[str, Any] = {"settings": settings, "formats": {}, "models": {}}
    for made, change in MADE.items():
        changed = load(lambda line: None)
        change(changed)
        found = read_made(changed, make_haystack(tokenizer, options.made_tokens, 0), options.chunk)
        results["models"][made] = found
        save_json("quality", results, options.out)
        print(f"{made}: perplexity {found[PLAIN]:.3f}", flush=True)
    capacity = max(len(text.ids) + 64, options.prompts * (PROMPT + options.new_tokens))
    rows: list[list[str]] = []
    plain: tuple[Reading, list[list[int]]] | None = None
    for name in formats:
        side = make_side(model, name, capacity)
        reading = side.read(text, options.chunk)
        texts = side.generate(prompts, options.new_tokens)
        value = perplexity(reading, text)
        if plain is None:
            apart = float((reading.losses[: len(own)] - own).abs().max())
            if not apart <= AGREEMENT:
                refuse(f"losses are {apart:.2g} nats from the model's own")
            plain = reading, texts
        figures = {
            "bytes_per_token": side.bytes_per_token,
            "perplexity": value,
            "perplexity_ratio": value / perplexity(plain[0], text),
            "divergence": divergence(reading, plain[0]),
            "same_likeliest": float((reading.likeliest == plain[0].likeliest).double().mean()),
            "needles_right": reading.num_right,
            "needle_probability": math.exp(fmean(reading.answers)) if reading.answers else None,
            "greedy_agreement": agreement(texts, plain[1]),
            "seconds": reading.seconds,
        }
        results["formats"][name] = figures
        rows.append(shown(name, figures, options.needles))
        print(f"{name}: perplexity {value:.3f}, read in {reading.seconds:.0f} s", flush=True)
        save_json("quality", results, options.out)

    print()
    print_table(
        [
            "K/V",
            "bytes/token",
            "perplexity",
            "to auto",
            "divergence",
            "same likeliest",
            "numbers right",
            "probability",
            "greedy agreement",
        ],
        rows,
    )
    print()
    sides = list(results["models"]["as it is"])
    by_model = [[name, *(f"{found[name]:.2f}" for found in results["models"].values())] for name in sides]
    print_table([f"perplexity of {options.made_tokens:,} tokens", *MADE], by_model)
    print_json("quality", results, options.out)


def shown(name: str, figures: Mapping[str, Any], num_needles: int) -> list[str]:
    """Returns a format's row of the table."""
    probability = figures["needle_probability"]
    return [
        name,
        f"{figures['bytes_per_token']:,}",
        f"{figures['perplexity']:.3f}",
        f"{100 * figures['perplexity_ratio'] - 100:+.2f} %",
        f"{figures['divergence']:.5f}",
        f"{100 * figures['same_likeliest']:.1f} %",
        f"{figures['needles_right']} of {num_needles}",
        "–" if probability is None else f"{probability:.3f}",
        f"{figures['greedy_agreement']:.2f}",
    ]


if __name__ == "__main__":
    main()
