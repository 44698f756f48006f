"""Measures what the service itself adds to the device's time: to a first token, and for each token.

    python -m bench.serving.host_path --out bench/results/host-path.json

Router, worker and API are real processes, and requests come over HTTP. The device is scripted
(`scripted_service.py`): a step takes a fixed time, in which the worker sleeps, and returns random tokens. So
the floor is the device's own time, and the rest is the service's: processor time of its processes and of this
client, and waiting. It reports

    first token   one client, whose next request comes --pause seconds after the last answer: the time to its
                  first token beyond the device's step; the processor time of a request; the same for the very
                  first request, and with --idle for one after that many idle seconds
    a token       at 1, 32 and 256 closed-loop clients: processor time of each process per token, and the mean
                  time between tokens beside the device's

Prompts are random token ids, and answers are streamed. On a machine with few cores the rates and the times
of many clients are those of the machine. The API process then sends several tokens in a piece, which takes less
processor time a token; a larger --decode-ms gives it the time to send each by itself.
"""

import argparse
import random
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import uvloop

from bench.common.report import Spread, parser, print_json, print_machine, print_table, refuse
from bench.serving.load_client import Answer, Endpoint, closed_loop
from bench.serving.scripted_service import MODEL, Script, ScriptedService, scripted_service
from bench.serving.workload import Ask, Lengths, fill
from lightkv.router.config import EngineConfig
from lightkv.router.model_files import resolve

ROLES = ("api", "router", "worker", "client")


class Bench:
    """Sends requests to one service, and reads the processor time of its processes."""

    def __init__(self, service: ScriptedService, script: Script, options: argparse.Namespace) -> None:
        self._service = service
        self._script = script
        self._options = options
        self._endpoint = Endpoint(service.url, None, 600.0)
        self._rng = random.Random(options.seed)

    def first_token_ms(self, pause: float) -> float:
        """Sends one request after a pause in seconds. Returns the milliseconds to its first token beyond the
        device's step."""
        time.sleep(pause)
        (answer,) = self._run(self._asks(1, 2), 1)
        return answer.ttft * 1e3 - self._script.prompt_ms * self._options.prompt / 512

    def first_tokens(self, num: int) -> dict[str, Any]:
        """Sends `num` requests one after another. Returns the times beyond the device's, and the processor time
        of a request, in milliseconds."""
        before = self._cpu_seconds()
        times = [self.first_token_ms(self._options.pause) for _ in range(num)]
        after = self._cpu_seconds()
        cpu_ms = {role: (after[role] - before[role]) / num * 1e3 for role in ROLES}
        return {"added_ms": Spread.of(times)._asdict(), "mean_ms": mean(times), "cpu_ms": cpu_ms}

    def load(self, clients: int) -> dict[str, Any]:
        """Runs a closed loop. Returns the processor time per token, and the mean time between tokens."""
        output = self._options.output
        num = max(self._options.requests * clients, 4) if clients < 256 else clients
        before, begun = self._cpu_seconds(), time.perf_counter()
        answers = self._run(self._asks(num, output), clients)
        seconds, after = time.perf_counter() - begun, self._cpu_seconds()
        num_tokens = sum(answer.num_output for answer in answers)
        if num_tokens != num * output:
            refuse(f"{num_tokens} tokens for {num} requests of {output}")
        cpu_us = {role: (after[role] - before[role]) / num_tokens * 1e6 for role in ROLES}
        return {
            "requests": num,
            "tokens_per_s": num_tokens / seconds,
            "between_ms": mean(answer.per_token[0] for answer in answers) * 1e3,
            "tokens_per_piece": num_tokens / sum(len(answer.arrivals) for answer in answers),
            "device_ms": self._script.decode_ms + self._script.row_ms * clients,
            "cpu_us": cpu_us,
        }

    def _asks(self, num: int, output: int) -> list[Ask]:
        lengths = [Lengths(self._options.prompt, output)] * num
        return fill(lengths, self._script.vocab_size, self._rng)

    def _run(self, asks: Sequence[Ask], clients: int) -> list[Answer]:
        return uvloop.run(closed_loop(self._endpoint, MODEL, asks, clients))

    def _cpu_seconds(self) -> dict[str, float]:
        return {"client": time.process_time(), **self._service.cpu_seconds()}


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--clients", type=int, nargs="*", default=[1, 32, 256])
    made.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    made.add_argument("--output", type=int, default=128, help="tokens of an answer under load")
    made.add_argument("--requests", type=int, default=4, help="of each client; 256 clients send one each")
    made.add_argument("--first", type=int, default=48, help="requests whose first token is measured")
    made.add_argument("--pause", type=float, default=0.002, help="seconds between these requests")
    made.add_argument("--idle", type=float, nargs="*", default=[], help="seconds without a request, then one")
    made.add_argument("--decode-ms", type=float, default=Script().decode_ms, help="of a step with decodes")
    made.add_argument("--check-ms", type=float, default=5.0, help="of the worker's recount between steps")
    made.add_argument("--seed", type=int, default=0)
    return made.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    options = arguments(argv)
    script = Script(decode_ms=options.decode_ms, check_ms=options.check_ms)
    print_machine()
    print(
        f"floor: a prompt of 512 tokens takes {script.prompt_ms:g} ms, a step of n decodes "
        f"{script.decode_ms:g} + {script.row_ms:g} n ms, a recount of the memory {script.check_ms:g} ms\n"
    )
    results: dict[str, Any] = {}
    directory = Path(resolve(EngineConfig.model, report=lambda line: None))
    with scripted_service(script, directory) as service:
        bench = Bench(service, script, options)
        results["very_first_ms"] = bench.first_token_ms(0.0)
        results["first_token"] = bench.first_tokens(options.first)
        results["after_idle_ms"] = {f"{idle:g}": bench.first_token_ms(idle) for idle in options.idle}
        results["loads"] = {str(clients): bench.load(clients) for clients in options.clients}
    first = results["first_token"]
    cpu = first["cpu_ms"]
    rows = [
        ["the very first", f"{results['very_first_ms']:.2f}", "", *[""] * len(ROLES)],
        ["every other", Spread(**first["added_ms"]).text(), f"{first['mean_ms']:.2f}"]
        + [f"{cpu[role]:.2f}" for role in ROLES],
        *([f"after {idle} s", f"{ms:.2f}", "", *[""] * 4] for idle, ms in results["after_idle_ms"].items()),
    ]
    print_table(["first token", "added ms", "mean", *(f"{role} CPU ms" for role in ROLES)], rows)
    print()
    rows = [
        [clients, f"{own['tokens_per_s']:.0f}", f"{own['tokens_per_piece']:.2f}"]
        + [f"{own['between_ms']:.2f}", f"{own['device_ms']:.2f}"]
        + [f"{own['cpu_us'][role]:.0f}" for role in ROLES]
        for clients, own in results["loads"].items()
    ]
    header = [
        "clients",
        "tokens/s",
        "a piece",
        "between ms",
        "device ms",
        *(f"{role} CPU µs a token" for role in ROLES),
    ]
    print_table(header, rows)
    settings = {key: value for key, value in vars(options).items() if key != "out"}
    print_json("host_path", {"settings": settings, **results}, options.out)


if __name__ == "__main__":
    main()
