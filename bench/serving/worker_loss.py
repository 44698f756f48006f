"""Measures how soon a lost worker is noticed under load, and how soon the service answers again.

    python -m bench.serving.worker_loss --device cuda --out bench/results/worker-loss-h200.json

It starts `lightkv serve` with a pool of a given size (options after `--` go to that command), and runs
--streams streams. Then it kills the worker (SIGKILL), or stops it so that a step never ends (SIGSTOP),
several times each. The floor of the recovery is the start of a worker, which is measured when the service
starts.

It exits without figures unless, each time, every stream ends with an error, one new worker was started, its
pool has the same size, a greedy answer is the same as before, and no token is held afterwards. On a GPU the
memory in use by all processes also has to return to within 64 MiB, so nothing else may run on that GPU.
"""

import argparse
import asyncio
import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import uvloop

from bench.common.report import Spread, parser, print_json, print_machine, print_table, refuse
from bench.serving.load_client import Endpoint, Reply, RequestFailed
from bench.serving.served import Server, ServerFailed, parse_with_serve
from bench.serving.soak import lost_tokens
from lightkv.router import EngineConfig

COMPLETIONS = "/v1/completions"
ANSWER_SECONDS = 300.0
POLL_SECONDS = 0.02
RUN_SECONDS = 2.0  # for which the streams run before the worker is lost
APART_SECONDS = 32.0  # between two losses, because the service gives up after three within a minute
MEMORY_SLACK = 64 * 2**20
SIGNALS = (signal.SIGKILL, signal.SIGSTOP)


class Loss(NamedTuple):
    """The loss of a worker: seconds until the last stream ended, and until requests were accepted again."""

    noticed: float
    ready: float


async def until(holds: Callable[[], Any], what: str) -> None:
    """Waits until `holds()` is true. Raises RequestFailed, which names `what`, after ANSWER_SECONDS."""
    end = time.monotonic() + ANSWER_SECONDS
    while not await holds():
        if time.monotonic() > end:
            raise RequestFailed(f"no {what} within {ANSWER_SECONDS:g} s")
        await asyncio.sleep(POLL_SECONDS)


def used_bytes(device: str) -> int:
    """Returns the bytes of the GPU's memory that all processes use; 0 on a CPU."""
    if device == "cpu":
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


class Losses:
    """Ends workers of one service. `failures`: what was wrong."""

    def __init__(self, server: Server, options: argparse.Namespace) -> None:
        self.failures: list[str] = []
        self._server = server
        self._options = options
        self._endpoint = Endpoint(server.url, None, ANSWER_SECONDS)

    async def lose(self, number: signal.Signals) -> Loss:
        """Sends a signal to the worker under load and measures the recovery. Raises RequestFailed."""
        expected, before = await self._greedy(), await self._at_rest()
        used = used_bytes(self._options.device)
        body = {"prompt": "Once upon a time", "max_tokens": self._options.tokens, "ignore_eos": True}
        asked = [
            asyncio.create_task(self._post({**body, "seed": idx, "stream": True}))
            for idx in range(self._options.streams)
        ]
        await until(self._all_run, f"{len(asked)} running streams")
        await asyncio.sleep(RUN_SECONDS)
        begun = time.monotonic()
        os.kill(self._server.pids()["worker"], number)
        replies = await asyncio.gather(*asked)
        noticed = time.monotonic() - begun
        await until(self._is_ready, "readiness")
        loss = Loss(noticed, time.monotonic() - begun)
        got, after = await self._greedy(), await self._at_rest()
        self.compare(number, before, after, replies)
        if got != expected:
            self.failures.append(f"{number.name}: {got!r} where {expected!r} was answered before")
        if abs(used_bytes(self._options.device) - used) > MEMORY_SLACK:
            now = used_bytes(self._options.device)
            self.failures.append(f"{number.name}: {used >> 20} MiB of the GPU were in use, now {now >> 20}")
        return loss

    def compare(
        self, number: signal.Signals, before: dict[str, Any], after: dict[str, Any], replies: list[Reply]
    ) -> None:
        """Records every difference from a service that has lost its worker and nothing else."""
        whole = [reply for reply in replies if b'"error"' not in reply.events[-1]]
        if whole:
            self.failures.append(
                f"{number.name}: {len(whole)} of {len(replies)} streams ended without an error"
            )
        if after["capacity"] != before["capacity"]:
            self.failures.append(
                f"{number.name}: a pool of {after['capacity']}, not {before['capacity']} tokens"
            )
        if after["num_worker_starts"] != before["num_worker_starts"] + 1:
            self.failures.append(f"{number.name}: the worker was started {after['num_worker_starts']} times")
        before = before | {"num_worker_starts": after["num_worker_starts"]}
        self.failures += [f"{number.name}: {failure}" for failure in lost_tokens(before, after)]

    async def _post(self, body: dict[str, Any]) -> Reply:
        reply = await self._endpoint.request("POST", COMPLETIONS, json.dumps(body).encode())
        if reply.status != 200:
            raise RequestFailed(f"{COMPLETIONS}: status {reply.status}: {reply.body[:400]!r}")
        return reply

    async def _greedy(self) -> str:
        body = {"prompt": "The sea", "max_tokens": 32, "temperature": 0, "ignore_eos": True}
        return str(json.loads((await self._post(body)).body)["choices"][0]["text"])

    async def _all_run(self) -> bool:
        return bool((await self._endpoint.get("/load"))["num_running"] == self._options.streams)

    async def _is_ready(self) -> bool:
        return (await self._endpoint.request("GET", "/ready")).status == 200

    async def _at_rest(self) -> dict[str, Any]:
        async def rests() -> bool:
            load = await self._endpoint.get("/load")
            return not (load["num_running"] or load["num_waiting"] or load["held"])

        await asyncio.sleep(1.0)  # the API process gets the router's counts four times a second
        await until(rests, "idle service")
        load: dict[str, Any] = await self._endpoint.get("/load")
        return load


async def measure(server: Server, options: argparse.Namespace) -> tuple[dict[str, list[Loss]], list[str]]:
    """Ends workers with each signal in turn. Returns the losses by signal, and the failures."""
    losses = Losses(server, options)
    found: dict[str, list[Loss]] = {number.name: [] for number in SIGNALS}
    for _ in range(options.rounds):
        for number in SIGNALS:
            apart = asyncio.create_task(asyncio.sleep(APART_SECONDS))
            found[number.name].append(await losses.lose(number))
            await apart
    return found, losses.failures


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    made = parser(__doc__)
    made.add_argument("--model", default=EngineConfig.model)
    made.add_argument("--device", default="cpu")
    made.add_argument("--streams", type=int, default=64)
    made.add_argument("--tokens", type=int, default=8000, help="of each stream, more than it will get")
    made.add_argument("--rounds", type=int, default=2)
    made.add_argument("--step-timeout", type=float, default=5.0)
    made.add_argument("--max-total-tokens", type=int, default=600_000)
    return parse_with_serve(made, argv)


def main() -> None:
    options = arguments()
    print_machine()
    command = ["--model", options.model, "--device", options.device, "--max-num-seqs", str(options.streams)]
    command += ["--max-total-tokens", str(options.max_total_tokens)]
    command += ["--step-timeout", str(options.step_timeout), *options.serve]
    begun = time.monotonic()
    try:
        with Server(command) as server:
            start = time.monotonic() - begun
            found, failures = uvloop.run(measure(server, options))
    except (RequestFailed, ServerFailed) as error:
        refuse(str(error))
    if failures:
        refuse("\n".join(failures))
    print(f"the floor: the service started in {start:.1f} s; a step may take {options.step_timeout:g} s\n")
    spreads = {
        name: {field: Spread.of([getattr(loss, field) for loss in losses]) for field in Loss._fields}
        for name, losses in found.items()
    }
    print_table(
        ["signal", "streams ended, s", "ready again, s"],
        [[name, own["noticed"].text(), own["ready"].text()] for name, own in spreads.items()],
    )
    results = {
        "streams": options.streams,
        "step_timeout_s": options.step_timeout,
        "start_s": start,
        "losses": {name: [loss._asdict() for loss in losses] for name, losses in found.items()},
    }
    print_json("worker_loss", results, options.out)


if __name__ == "__main__":
    main()
