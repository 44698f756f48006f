"""A model on several ranks beside the same model on one: decode steps, first tokens, and how many tokens fit.

    python -m bench.common.random_checkpoint /var/tmp/llama-3-8b --max-length 8192
    python -m bench.serving.ranks /var/tmp/llama-3-8b --ranks 2 --out bench/results/ranks-h100.json

Each side is the router's own: an engine that sends plans to worker processes, with as many steps in flight as
in a service. A decode step is the wall time between results while the batch is full. Before anything is
timed, both sides answer the same requests greedily; where they compute in float32, the answers have to be the
same tokens, and in 16 bits, where the last bit of a sum decides between close tokens, the share of equal
first tokens is told.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from array import array
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from bench.common.report import machine
from lightkv.router.config import EngineConfig
from lightkv.router.engine.loop import Engine, make_scheduler
from lightkv.router.engine.request import Request
from lightkv.router.engine.step import RunnerInfo, TokenEvent
from lightkv.router.sampling_params import SamplingParams
from lightkv.router.service.ranks.worker_group import Worker, WorkerGroup
from lightkv.router.service.worker_client import WorkerClient

BATCHES = (1, 32, 256)
CONTEXT, STEPS, WARM = 512, 60, 10
PROMPTS = (512, 2048, 8192)
TIMES = 5


class Side:
    """One worker, or a group, and an engine that drives it as the router does."""

    def __init__(self, worker: Worker, info: RunnerInfo) -> None:
        self.worker = worker
        self.info = info
        self.engine = Engine(make_scheduler(info))

    async def run(self, requests: list[Request]) -> tuple[dict[str, list[int]], list[float]]:
        """Runs the requests. Returns their tokens, and the time of each result that had tokens."""
        engine = self.engine
        engine.add(*requests)
        tokens: dict[str, list[int]] = {request.id: [] for request in requests}
        times: list[float] = []

        def take(events: list[TokenEvent]) -> None:
            for event in events:
                if event.token is not None:
                    tokens[event.request_id].append(event.token)
            times.append(time.perf_counter())

        while engine.has_work:
            plan = engine.plan()
            result = await (self.worker.flush() if plan is None else self.worker.step(plan))
            if result is None and plan is not None and not engine.can_plan:
                result = await self.worker.flush()
            if result is not None:
                take(engine.complete(result))
        engine.evict_cached()
        await self.worker.check(*engine.sync_memory())
        return tokens, times

    def requests(self, num: int, length: int, max_tokens: int, seed: int) -> list[Request]:
        rng = np.random.default_rng(seed)
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        ids = rng.integers(3, self.info.limits.vocab_size, size=(num, length), dtype=np.int32)
        return [
            Request(f"{seed}-{i}", array("i", row.tobytes()).tobytes(), params, seed=1)
            for i, row in enumerate(ids)
        ]

    async def decode_ms(self, batch: int) -> float:
        """Returns the median milliseconds of a step of `batch` decodes after about CONTEXT tokens each."""
        num_prompt_steps = -(-batch * CONTEXT // self.info.limits.prefill_budget)
        _, times = await self.run(self.requests(batch, CONTEXT, STEPS + num_prompt_steps, seed=batch))
        steps = [1e3 * (b - a) for a, b in pairwise(times)]
        return statistics.median(steps[num_prompt_steps + WARM : -2])

    async def first_token_ms(self, length: int) -> float:
        """Returns the median milliseconds from a prompt's arrival to its token."""
        found = []
        for turn in range(TIMES + 1):
            begun = time.perf_counter()
            _, times = await self.run(self.requests(1, length, 1, seed=1000 * length + turn))
            found.append(1e3 * (times[-1] - begun))
        return statistics.median(found[1:])

    async def figures(self) -> dict[str, Any]:
        most = self.info.limits.max_num_seqs
        longest = self.info.limits.max_model_len
        return {
            "capacity": self.info.capacity,
            "bytes_per_token_and_rank": self.info.bytes_per_token,
            "decode_ms": {str(n): await self.decode_ms(n) for n in BATCHES if n <= most},
            "first_token_ms": {str(n): await self.first_token_ms(n) for n in PROMPTS if n < longest},
        }


async def start(config: EngineConfig, num_ranks: int, folder: Path) -> Side:
    worker: Any = WorkerClient() if num_ranks == 1 else WorkerGroup(num_ranks, folder / "ranks")
    info = await worker.start(config, lambda line: print(f"  {num_ranks}: {line}", flush=True))
    return Side(worker, info)


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    config = EngineConfig(
        model=str(options.model),
        device=options.device,
        dtype=options.dtype,
        itl_target=0.0,
        prefill_chunk=options.chunk,
    )
    sides: dict[str, Any] = {}
    answers: dict[int, dict[str, list[int]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for num_ranks in (1, *options.ranks):
            begun = time.perf_counter()
            side = await start(config, num_ranks, Path(folder))
            took = time.perf_counter() - begun
            answers[num_ranks], _ = await side.run(side.requests(8, 100, 16, seed=0))
            sides[str(num_ranks)] = {"start_s": took}
            if not options.check_only:
                sides[str(num_ranks)] |= await side.figures()
            side.worker.kill()
            await side.worker.wait_dead()
    for num_ranks in options.ranks:
        pairs = [(answers[1][name], answers[num_ranks][name]) for name in answers[1]]
        equal = sum(one == other for one, other in pairs)
        if options.dtype == "float32" and equal < len(pairs):
            raise SystemExit(
                f"{num_ranks} ranks answer {len(pairs) - equal} of {len(pairs)} requests differently"
            )
        first = sum(one[0] == other[0] for one, other in pairs)
        sides[str(num_ranks)] |= {
            "equal_answers": f"{equal} of {len(pairs)}",
            "equal_first": f"{first} of {len(pairs)}",
        }
    return sides


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("model", type=Path, help="a directory with a checkpoint")
    options.add_argument("--ranks", type=int, nargs="+", default=[2])
    options.add_argument("--device", default="auto")
    options.add_argument("--dtype", default="auto")
    options.add_argument("--chunk", type=int, help="the most prompt tokens of a step")
    options.add_argument("--check-only", action="store_true", help="compare answers, and time nothing")
    options.add_argument("--out", type=Path)
    given = options.parse_args()
    for num_ranks in given.ranks:
        print(f"floor: {num_ranks} ranks read 1/{num_ranks} of the weights and of K and V each:")
        print(f"       at least {1 / num_ranks:.2f} of a step's time on one, and the sums on top")
    sides = asyncio.run(measure(given))
    for name, figures in sides.items():
        print(name, figures, flush=True)
    report = {**machine(), "model": given.model.name, "dtype": given.dtype, "ranks": sides}
    print(json.dumps(report))
    if given.out:
        given.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
