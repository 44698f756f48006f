"""Compares steps with prompts on a model of a published model's shape: by the graph of a bucket of tokens, as
the engine runs them, by a graph of exactly the step's size, and eagerly.

    python -m bench.serving.prompt_step --out bench/results/prompt-step-h200.json

A case is the tokens of one prompt, alone or with decodes: `700+100x2048` has 100 decodes that have 2,048 tokens
each. A step allocates its slots, computes and samples (greedy); its wall time ends when its tokens are on the
device, and the host's part is the time until everything is launched. The K/V is random, so are the weights. The
floor is the longer of reading every weight once, at the bandwidth measured in this run, and the matrix products
of the layers at the rate that a large product of this run reaches; attention and the LM head are left out. The
graph of the bucket has to be within 1.05 times the better of the other two. Steps above the largest bucket have
no graph in the engine.
"""

import statistics
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from transformers import PreTrainedModel

from bench.common.model_shapes import SHAPES, with_layers
from bench.common.random_model import random_model
from bench.common.report import Spread, alternate, parser, print_json, print_machine, print_table, refuse
from bench.serving.decode_step import read_bandwidth
from lightkv.attention import BatchShape
from lightkv.edits import Alloc, FreeRange
from lightkv.memory.capture import Capture
from lightkv.router import EngineConfig
from lightkv.router.engine.step import StepPlan
from lightkv.router.model.build import assemble
from lightkv.router.model.cuda_graph import PromptGraph, SharedLogits
from lightkv.router.model.parts import AppliedPlan, Sampling
from lightkv.router.model.runner import ModelRunner
from lightkv.router.model.step_graphs import StepGraphs
from lightkv.router.sampling_params import SamplerKind

ALONE = (16, 64, 128, 512, 700, 1300, 2048, 4096, 8192)
CASES = (*map(str, ALONE), "700+100x2048")
WARM_UP = 2  # steps of each side before a round's
TOLERANCE = 0.1  # of the largest logit: the rounding of bf16 over all layers


@dataclass(frozen=True)
class Case:
    """The tokens of one prompt, and how many decodes there are beside it, of how many tokens each."""

    prompt: int
    decodes: int = 0
    length: int = 0

    @classmethod
    def of(cls, text: str) -> "Case":
        """Reads `PROMPT` or `PROMPT+DECODESxLENGTH`. Raises ValueError."""
        prompt, _, beside = text.partition("+")
        decodes, _, length = beside.partition("x")
        return cls(int(prompt), int(decodes or 0), int(length or 0))

    @property
    def num_tokens(self) -> int:
        return self.prompt + self.decodes

    def text(self) -> str:
        beside = f" + {self.decodes} x {self.length:,}" if self.decodes else ""
        return f"{self.prompt:,}{beside}"

    def plan(self, vocab_size: int) -> StepPlan:
        """Returns the step: the prompt in row 1, the decodes in the rows after it."""
        num = 1 + self.decodes
        ids = array("i", [i * 7919 % vocab_size for i in range(self.prompt)]).tobytes()
        starts, counts = [0] + [self.length] * self.decodes, [self.prompt] + [1] * self.decodes
        sample, kind = list(range(num)), SamplerKind.GREEDY
        return StepPlan(0, b"", list(range(1, num + 1)), starts, counts, 1, ids, sample, kind, {}, [], 0)


class Step:
    """One case on a runner: its slots, and the ways to run it."""

    def __init__(self, runner: ModelRunner, case: Case, vocab_size: int) -> None:
        self._runner = runner
        self.plan = case.plan(vocab_size)
        self._memory = runner._parts.memory
        self._decode_rows = tuple(self.plan.rows[1:])
        if case.decodes:
            counts = (case.length,) * case.decodes
            self._memory.apply([Alloc(self._decode_rows, (0,) * case.decodes, counts)])
        decode_alloc = self.plan.decode_alloc
        self._allocs = [Alloc((1,), (0,), (case.prompt,)), *([decode_alloc] if decode_alloc else [])]
        self._frees = [
            FreeRange(1, 0, case.prompt),
            *(FreeRange(row, case.length, case.length + 1) for row in self._decode_rows),
        ]
        self._ends = [FreeRange(row, 0, case.length) for row in self._decode_rows]

    def close(self) -> None:
        """Frees the slots of the decodes."""
        self._memory.apply(self._ends)

    def times(self, forward: Callable[[AppliedPlan], Sampling], steps: int) -> list[tuple[float, float]]:
        """Measures wall and host milliseconds of `steps` steps."""
        found = []
        for _ in range(WARM_UP + steps):
            torch.cuda.synchronize()
            start = time.perf_counter()
            self._memory.apply(self._allocs)
            forward(AppliedPlan(self.plan, {}))(None)
            launched = time.perf_counter()
            torch.cuda.synchronize()
            end = time.perf_counter()
            found.append(((end - start) * 1e3, (launched - start) * 1e3))
            self._memory.apply(self._frees)
        return found[WARM_UP:]

    def agrees(self, graph: PromptGraph) -> bool:
        """Returns whether the logits of a graph's replay are those of an eager step, up to rounding."""
        self._memory.apply(self._allocs)
        expected = self._runner._logits(AppliedPlan(self.plan, {})).logits
        graph.replay_forward(AppliedPlan(self.plan, {}))
        _, logits = graph._graphs[False]
        difference = (logits[: len(expected)] - expected).abs().max()
        self._memory.apply(self._frees)
        return bool(difference <= TOLERANCE * expected.abs().max())


def make_runner(model: PreTrainedModel, cases: list[Case]) -> ModelRunner:
    """Returns a runner with room for every case, whose pool is full of random K/V."""
    longest = max(max(case.prompt, case.length + 1) for case in cases)
    config = EngineConfig(
        device="cuda",
        max_model_len=longest,
        max_total_tokens=max(case.num_tokens + case.decodes * case.length for case in cases) + 1,
        prefill_chunk=longest,
        itl_target=0.0,
    )
    runner, _ = assemble(model, config, print)
    while runner.num_missing_graphs:
        runner.capture()
    pool = runner._parts.memory.pool
    for layer in range(pool.spec.num_layers):
        pool.kv(layer).normal_()
    return runner


def exact_graph(runner: ModelRunner, case: Case) -> PromptGraph:
    """Captures a graph of exactly the case's tokens, prompt and decodes."""
    shape = BatchShape(case.num_tokens, 2, case.decodes)
    graph = PromptGraph(runner._parts, shape, runner.limits, SharedLogits(1 + case.decodes))
    capture = Capture.new()
    with capture.rehearsal():
        graph.rehearse()
    graph.capture(False, capture)
    return graph


def product_rate() -> float:
    """Measures the bfloat16 operations per second of a product of 8,192 in each dimension."""
    size = 8192
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    times = []
    for _ in range(13):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        torch.mm(a, b)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return 2 * size**3 / statistics.median(times[3:]) * 1e3


@torch.inference_mode()
def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--cases", nargs="+", default=list(CASES), help="PROMPT or PROMPT+DECODESxLENGTH")
    arguments.add_argument("--rounds", type=int, default=4)
    arguments.add_argument("--steps", type=int, default=8, help="steps of each side in a round")
    arguments.add_argument("--shape", choices=SHAPES, default="llama-3-8b")
    arguments.add_argument("--layers", type=int, help="fewer than the shape has")
    options = arguments.parse_args()
    cases = [Case.of(text) for text in options.cases]

    print_machine()
    bandwidth, rate = read_bandwidth(), product_rate()
    torch.manual_seed(0)
    shape = SHAPES[options.shape]
    shape = with_layers(shape, options.layers or shape.num_hidden_layers)
    model = random_model(shape, torch.device("cuda"), torch.bfloat16)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    embedding = model.get_input_embeddings().weight.nbytes  # type: ignore[union-attr]
    weights -= embedding
    per_token = weights - embedding  # 2 operations for each weight of 2 bytes in the layers
    runner = make_runner(model, cases)
    graphs = runner._graphs
    assert isinstance(graphs, StepGraphs)
    print(f"read bandwidth {bandwidth / 1e12:.2f} TB/s; products {rate / 1e12:.0f} TFLOP/s\n")

    rows, results = [], {}
    for case in cases:
        floor = max(weights / bandwidth, case.num_tokens * per_token / rate) * 1e3
        step = Step(runner, case, shape.vocab_size)
        exact, bucket = exact_graph(runner, case), graphs.get(step.plan)
        runs = {"exact": exact.replay_forward, "eager": runner._forward}
        if isinstance(bucket, PromptGraph):
            runs["bucket"] = bucket.replay_forward
            if not step.agrees(bucket):
                refuse(f"{case.text()}: the logits of the bucket's graph are not those of an eager step")
        if not step.agrees(exact):
            refuse(f"{case.text()}: the logits of the exact graph are not those of an eager step")
        found: dict[str, list[tuple[float, float]]] = {side: [] for side in runs}
        sides = {side: partial(step.times, run, options.steps) for side, run in runs.items()}
        for one in alternate(options.rounds, sides):
            for side, times in one.items():
                found[side] += times
        step.close()
        wall = {side: Spread.of([wall for wall, _ in times]) for side, times in found.items()}
        host = {side: statistics.median(host for _, host in times) for side, times in found.items()}
        best = min(wall["exact"].median, wall["eager"].median)
        ratio = wall["bucket"].median / best if "bucket" in wall else None
        size = bucket.shape.num_tokens if isinstance(bucket, PromptGraph) else None
        rows.append(
            [case.text(), f"{floor:.2f}", str(size or "none"),
             *(wall[side].text() if side in wall else "-" for side in ("bucket", "exact", "eager")),
             "-" if ratio is None else f"{ratio:.3f}",
             *(f"{host[side]:.2f}" if side in host else "-" for side in ("bucket", "eager"))]
        )  # fmt: skip
        results[case.text()] = {
            "floor_ms": floor,
            "bucket_tokens": size,
            "wall_ms": {side: spread._asdict() for side, spread in wall.items()},
            "host_ms": host,
            "bucket_to_best": ratio,
        }
        del exact
    header = ["prompt + decodes", "floor ms", "bucket", "bucket ms", "exact graph ms", "eager ms",
              "bucket / best", "host ms, bucket", "host ms, eager"]  # fmt: skip
    print_table(header, rows)
    settings = {
        "shape": options.shape,
        "layers": shape.num_hidden_layers,
        "rounds": options.rounds,
        "steps": options.steps,
        "read_TB_per_s": bandwidth / 1e12,
        "product_TFLOP_per_s": rate / 1e12,
    }
    print_json("prompt_step", {"settings": settings, "cases": results}, options.out)


if __name__ == "__main__":
    main()
