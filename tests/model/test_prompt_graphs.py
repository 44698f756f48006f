"""Static batches of steps with prompts, run launch by launch, give the tokens and slots of eager steps."""

import random
from array import array
from itertools import pairwise

import pytest
import torch

from lightkv.attention import AttentionMetadata, BatchShape
from lightkv.ledger import TokenLedger
from lightkv.router import EngineConfig, SamplingParams
from lightkv.router.engine.loop import LocalEngine
from lightkv.router.engine.request import Request
from lightkv.router.engine.scheduler import Scheduler
from lightkv.router.engine.step import StepPlan
from lightkv.router.model.build import assemble
from lightkv.router.model.cuda_graph import (
    FEW_PREFILLS,
    MOST_TOKENS,
    PromptGraph,
    SharedLogits,
    prompt_shapes,
    token_buckets,
)
from lightkv.router.model.parts import StepOutput
from lightkv.router.model.runner import ModelRunner
from tests.support.model_worker import assert_idle
from tests.support.tiny_models import VOCABULARY, tiny_llama

MAX_NUM_SEQS = 9
GREEDY = SamplingParams(temperature=0, max_tokens=12)
PARAMS = [
    GREEDY,
    SamplingParams(temperature=0.9, max_tokens=9),
    SamplingParams(temperature=0.8, top_k=20, frequency_penalty=0.5, logprobs=3, max_tokens=7),
]


class StaticBatches:
    """Stands in for the graphs of a runner: runs steps with prompts in the static batches of prompt graphs."""

    def __init__(self, runner: ModelRunner, most_tokens: int = 64) -> None:
        logits = SharedLogits(MAX_NUM_SEQS)
        self.graphs = {
            shape: PromptGraph(runner._parts, shape, runner._metadata, logits)
            for size in token_buckets(most_tokens)
            for shape in prompt_shapes(size, MAX_NUM_SEQS)
        }
        self.used: set[BatchShape] = set()
        self.ran: PromptGraph | None = None
        self.allocates = False

    def get(self, plan: StepPlan) -> "StaticBatches | None":
        if not plan.num_prefills:
            return None
        num_decodes = len(plan.rows) - plan.num_prefills
        shape = next(
            shape for shape in self.graphs if shape.fits(plan.num_tokens, plan.num_prefills, num_decodes)
        )
        self.used.add(shape)
        self.ran = self.graphs[shape]
        return self

    def replay(self, plan: StepPlan) -> StepOutput:
        assert self.ran is not None
        return self.ran.run(plan)


def make(backend: str, **settings: object) -> tuple[LocalEngine, ModelRunner]:
    model = tiny_llama(torch.device("cpu"), context=160)
    defaults: dict[str, object] = {
        "device": "cpu",
        "attention_backend": backend,
        "max_num_seqs": MAX_NUM_SEQS,
        "max_total_tokens": 900,
        "prefill_chunk": 40,
    }
    runner, info = assemble(model, EngineConfig(**(defaults | settings)), lambda line: None)  # type: ignore[arg-type]
    ledger = TokenLedger(info.capacity, info.limits.max_num_seqs, info.limits.max_model_len)
    return LocalEngine(Scheduler(ledger, info.limits), runner), runner


def add_requests(engine: LocalEngine, count: int, params: list[SamplingParams]) -> None:
    """Adds requests: a long prompt, many short ones, then longer ones, some of which begin alike."""
    rng = random.Random(0)
    system = [rng.randrange(VOCABULARY) for _ in range(45)]
    for i in range(count):
        shared = system[: rng.choice([0, 20, 45]) if i > 10 else 0]
        least, most = (1, 50) if i > 10 else (1, 3) if i else (100, 100)
        own = [rng.randrange(VOCABULARY) for _ in range(rng.randint(least, most))]
        ids = [*shared, *own]
        engine.add(Request(str(i), array("i", ids).tobytes(), params[i % len(params)], seed=i))


def run(
    engine: LocalEngine, count: int, table: torch.Tensor, noted: list[torch.Tensor]
) -> dict[str, list[int]]:
    """Runs all requests to their ends and returns their tokens. Some are aborted on the way. Adds a copy of
    `table` to `noted` after each step."""
    rng, tokens = random.Random(1), dict[str, list[int]]()
    while engine.has_work:
        if rng.random() < 0.1:
            engine.abort(str(rng.randrange(count)))
        for event in engine.step():
            assert event.error is None
            if event.token is not None:
                tokens.setdefault(event.request_id, []).append(event.token)
        noted.append(table.clone())
    return tokens


def test_buckets_grow_in_small_steps() -> None:
    for most in (1, 15, 16, 64, 76, 600, 2304, 10_000):
        buckets = token_buckets(most)
        assert buckets[-1] == min(most, MOST_TOKENS)
        assert buckets == sorted(set(buckets))
        for size, larger in pairwise(buckets):
            assert larger <= (1.2 if size >= 512 else 1.5) * size
            assert size < 512 or larger % 64 == 0 or larger == most


@pytest.mark.parametrize("max_num_seqs", [1, 3, 7, 8, 256])
def test_a_shape_fits_every_step(max_num_seqs: int) -> None:
    for size in token_buckets(600):
        shapes = prompt_shapes(size, max_num_seqs)
        most = min(size, max_num_seqs)
        assert shapes[0] == BatchShape(size, min(FEW_PREFILLS, most + 1), 0)
        for num_prefills in range(1, most + 1):
            num_decodes = most - num_prefills
            assert any(shape.fits(size, num_prefills, num_decodes) for shape in shapes)
        assert not any(shape.fits(size + 1, 1, 0) for shape in shapes)


def test_a_static_batch_has_decodes_first_and_padding_last(device: torch.device) -> None:
    _, runner = make("torch", cuda_graphs=False)
    memory = runner._parts.memory
    table = memory.table.req_to_token
    table[1:] = torch.arange(1, table[1:].numel() + 1, dtype=torch.int32).view(table[1:].shape) % 500
    metadata = AttentionMetadata(8, 16, memory).create_static(BatchShape(16, 4, 3))
    metadata.prepare([4, 2, 5, 1], [7, 0, 20, 30], [3, 2, 1, 1], 2)
    assert metadata.rows.tolist() == [4, 2, 0, 0, 5, 1, 0]
    assert metadata.kv_lens.tolist() == [10, 2, 0, 0, 21, 31, 0]
    assert metadata.q_starts.tolist() == [2, 5, 7, 7, 16]
    assert metadata.position_ids.tolist() == [20, 30, 7, 8, 9, 0, 1, *[0] * 9]
    places = [(5, 20), (1, 30), (4, 7), (4, 8), (4, 9), (2, 0), (2, 1)]
    assert metadata.slot_mapping.tolist() == [int(table[place]) for place in places] + [0] * 9
    assert (metadata.num_prefills, metadata.num_decodes, metadata.num_tokens) == (4, 3, 16)
    assert (metadata.first_decode_token, metadata.first_prefill_token, metadata.num_prefill_tokens) == (
        0,
        2,
        14,
    )
    before = metadata.q_starts.data_ptr(), metadata.slot_mapping.data_ptr()
    metadata.prepare([], [], [], 0)
    assert metadata.q_starts.tolist() == [0, 0, 0, 0, 16]
    assert not metadata.rows.any()
    assert not metadata.slot_mapping.any()
    assert before == (metadata.q_starts.data_ptr(), metadata.slot_mapping.data_ptr())
    for batch, message in (
        (([1, 2, 3, 4], [0] * 4, [1] * 4, 4), "4 prefills; there can be 0 to 3"),
        (([1, 2, 3, 4], [9] * 4, [1] * 4, 0), "4 decodes; there are slots for 3"),
        (([1], [0], [17], 1), "1 sequences of 17 tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            metadata.prepare(*batch)


@pytest.mark.parametrize(
    "settings", [{}, {"group_prefixes": True}, {"max_total_tokens": 260}], ids=["", "shared", "small"]
)
def test_static_batches_give_the_tokens_and_slots_of_eager_steps(settings: dict[str, object]) -> None:
    compare("torch", 24, settings)


@pytest.mark.slow  # in the interpreter
def test_static_batches_in_the_triton_kernels() -> None:
    compare("triton", 14, {})


def compare(backend: str, count: int, settings: dict[str, object]) -> None:
    """Runs the same requests eagerly and in static batches; memory is full of NaN where nothing is held."""
    results: list[dict[str, list[int]]] = []
    tables: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
    for static, noted in enumerate(tables):
        engine, runner = make(backend, **settings)
        memory = runner._parts.memory
        for layer in range(2):
            memory.pool.kv(layer)[1:] = float("nan")
        batches = StaticBatches(runner)
        if static:
            runner._graphs = batches  # type: ignore[assignment]
        add_requests(engine, count, PARAMS)
        results.append(run(engine, count, memory.table.req_to_token, noted))
        assert_idle(engine)
        assert not any(memory.pool.kv(layer)[0].isnan().any() for layer in range(2))
    assert results[0] == results[1]
    assert len(tables[0]) == len(tables[1])
    assert all(map(torch.equal, *tables))
    kinds = {(shape.num_prefills > FEW_PREFILLS, shape.num_decodes > 0) for shape in batches.used}
    assert kinds == {(False, False), (False, True), (True, True)}
