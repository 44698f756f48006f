"""Draws the requests of a soak run, and reads their answers.

Greedy requests have answers that are compared, sampled requests do not, and invalid requests have the status
with which they have to be refused.
"""

import json
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

from bench.serving.load_client import Reply, RequestFailed

COMPLETIONS = "/v1/completions"
CHATS = "/v1/chat/completions"

# Prompts are beginnings of this passage, so that they share prefixes of any length.
PASSAGE = (
    "The harbour town of Maren had two clocks, and they had never agreed. The older one hung in the tower "
    "of the customs house and was wound every Sunday by the harbour master, who set it by the tide. The "
    "other stood in the window of a watchmaker named Ilse Brandt, who set it by the stars, and who was "
    "known to close her shop for a whole evening when the sky was clear. Sailors trusted the tower, "
    "because a ship that misses the tide waits twelve hours for the next one. Bakers trusted the window, "
    "because bread does not wait for the sea. For most of the year the two were a few minutes apart, and "
    "people who had an appointment would ask by which clock it was meant. In the spring of a very wet "
    "year the difference grew to half an hour. The council met to decide which clock was right, and asked "
    "both of them to explain how time is measured. The harbour master brought a table of tides that his "
    "grandfather had begun. The watchmaker brought a small brass instrument, a notebook, and a lamp. She "
    "asked the council to come outside. It had stopped raining an hour before, and between the clouds "
    "there were"
)
QUESTIONS = (
    "Who owns the shop with the clock?",
    "Write one sentence about the sea.",
    "What is the capital of France?",
    "Why did sailors trust the tower?",
    "List three things that the watchmaker brought.",
    "Name a number between one and ten.",
    "Summarise the story in a few words.",
    "What happened in the spring?",
)
# Further fields of a greedy request, all equally likely. Letters as stop strings end some answers early, with
# random weights, too: else all would be expected to reach their limits, and none would be preempted.
EXTRAS: tuple[dict[str, Any], ...] = (
    {},
    {"n": 3},
    {"stop": [" the", "\n"]},
    {"stop": ["b", "v"]},
    {"n": 3, "stop": ["a", "e"]},
    {"repetition_penalty": 1.2, "stop": ["k", "."]},
    {"presence_penalty": 0.6, "frequency_penalty": 0.3},
    {"n": 2, "repetition_penalty": 1.1},
)
LOWEST_SAMPLED_ID = 100
MAX_SAMPLED_PROMPT = 240  # tokens


class Call(NamedTuple):
    """One request: its path and its JSON body."""

    path: str
    body: dict[str, Any]

    def encode(self, **more: Any) -> bytes:
        """Encodes the body, with `more` fields."""
        return json.dumps(self.body | more).encode()

    @property
    def logprobs(self) -> dict[str, Any]:
        """The fields that ask for two alternatives with each token."""
        return {"logprobs": True, "top_logprobs": 2} if self.path == CHATS else {"logprobs": 2}

    @property
    def is_penalised(self) -> bool:
        """Whether penalties change which token is the likeliest."""
        return any(name.endswith("_penalty") for name in self.body)


class Invalid(NamedTuple):
    """A request that has to be refused with `status`. `body`: the bytes sent, which may be invalid JSON."""

    name: str
    path: str
    body: bytes
    status: int


class Answer(NamedTuple):
    """An answer by the index of its choice: the text, the finish reason, the tokens' log-probabilities.

    `margins`: for each token the difference between its log-probability and the next likeliest one's. Both
    are empty if no log-probabilities were requested.
    """

    texts: dict[int, str]
    reasons: dict[int, str | None]
    logprobs: dict[int, list[float]]
    margins: list[float]


def greedy_call(rng: random.Random, model: str) -> Call:
    """Draws a completion or a chat at temperature 0."""
    words = PASSAGE.split(" ")
    beginning = " ".join(words[: rng.randint(4, len(words))])
    body: dict[str, Any] = {"model": model, "temperature": 0, "max_tokens": rng.randint(4, 48)}
    body |= rng.choice(EXTRAS)
    if rng.random() < 0.5:
        return Call(COMPLETIONS, body | {"prompt": beginning})
    messages = [
        {"role": "system", "content": beginning},
        {"role": "user", "content": rng.choice(QUESTIONS)},
    ]
    return Call(CHATS, body | {"messages": messages})


def sampled_call(rng: random.Random, model: str, vocab_size: int) -> Call:
    """Draws a sampled completion of random ids, which no other request has; some have a seed."""
    ids = range(min(LOWEST_SAMPLED_ID, vocab_size - 1), vocab_size)
    body: dict[str, Any] = {
        "model": model,
        "prompt": rng.choices(ids, k=rng.randint(1, MAX_SAMPLED_PROMPT)),
        "max_tokens": rng.randint(1, 96),
        "temperature": rng.choice((0.3, 0.8, 1.2)),
        "ignore_eos": True,
    }
    body |= rng.choice(({}, {"seed": rng.randrange(2**31)}, {"top_p": 0.9, "top_k": 40}, {"n": 2}))
    return Call(COMPLETIONS, body)


def invalid_calls(model: str, vocab_size: int, max_model_len: int) -> list[Invalid]:
    """Returns invalid requests of each kind, for a service whose pool has less than `max_model_len` tokens."""

    def completion(name: str, status: int = 400, **fields: Any) -> Invalid:
        return Invalid(
            name, COMPLETIONS, Call(COMPLETIONS, {"model": model, "prompt": "Hi"}).encode(**fields), status
        )

    def chat(name: str, **fields: Any) -> Invalid:
        return Invalid(name, CHATS, Call(CHATS, {"model": model}).encode(**fields), 400)

    return [
        completion("unknown model", 404, model="no-such-model"),
        completion("negative temperature", temperature=-1),
        completion("no tokens", max_tokens=0),
        completion("max_tokens as text", max_tokens="many"),
        completion("no answers", n=0),
        completion("top_p above 1", top_p=2),
        completion("empty prompt", prompt=[]),
        completion("prompt of objects", prompt=[{}]),
        completion("id outside the vocabulary", prompt=[vocab_size]),
        completion("prompt too long", prompt=[1] * (max_model_len + 1)),
        completion("answer too long", max_tokens=max_model_len + 1),
        completion("prompt of more than the pool", prompt=[1] * (max_model_len - 8), max_tokens=1),
        completion("bias of no token", logit_bias={"x": 1}),
        chat("no messages", messages=[]),
        chat("message without a role", messages=[{"content": "Hi"}]),
        chat("messages missing"),
        chat("alternatives without logprobs", messages=[{"role": "user", "content": "Hi"}], top_logprobs=3),
        Invalid("half of a JSON", COMPLETIONS, b'{"prompt": "Hi", "max_to', 400),
        Invalid("a list as the body", CHATS, b"[1, 2]", 400),
        Invalid("no such path", "/v1/no-such-path", b"{}", 404),
    ]  # fmt: skip


def read_answer(reply: Reply) -> Answer:
    """Reads the answer in a reply, which may be the first part of a stream. Raises RequestFailed."""
    if reply.status != 200:
        raise RequestFailed(f"status {reply.status}: {reply.body[:400].decode(errors='replace')}")
    documents = [json.loads(data) for data in reply.events or [reply.body] if data != b"[DONE]"]
    texts: dict[int, str] = {}
    reasons: dict[int, str | None] = {}
    logprobs: dict[int, list[float]] = {}
    margins: list[float] = []
    for document in documents:
        if "error" in document:
            raise RequestFailed(f"an error in the stream: {document['error']}")
        for choice in document["choices"]:
            idx = choice["index"]
            texts[idx] = texts.get(idx, "") + _text(choice)
            reasons[idx] = choice["finish_reason"] or reasons.get(idx)
            for own, alternatives in _scored(choice.get("logprobs") or {}):
                logprobs.setdefault(idx, []).append(own)
                margins.append(own - min(alternatives) if len(alternatives) > 1 else float("inf"))
    return Answer(texts, reasons, logprobs, margins)


def _text(choice: dict[str, Any]) -> str:
    if "text" in choice:
        return str(choice["text"])
    return (choice.get("message") or choice.get("delta") or {}).get("content") or ""


def _scored(logprobs: dict[str, Any]) -> Sequence[tuple[float, list[float]]]:
    """Returns each token's log-probability, and those of its two likeliest alternatives."""
    if "content" in logprobs:
        return [
            (token["logprob"], [other["logprob"] for other in token["top_logprobs"]])
            for token in logprobs["content"]
        ]
    pairs = zip(logprobs.get("token_logprobs", ()), logprobs.get("top_logprobs", ()), strict=True)
    return [(own, list(others.values())) for own, others in pairs]
