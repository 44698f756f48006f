"""The API keys of a soak run: requests are sent by one key after the other, some of which have limits, and what
the service says of its keys has to add up to its totals."""

import itertools
import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.serving.load_client import Endpoint, Reply

# Of the keys, in turn. Each leaves room for the largest request of `soak_requests.py`, and is often reached.
LIMITS = ("", " rpm=30", " max_parallel_requests=4", " tpm=4000")
# By the figure of a key: the total of /load, and the series of both in /metrics.
_TOTALS = {
    "prompt_tokens": ("prompt_tokens", "vllm:prompt_tokens", "lightkv:key_prompt_tokens"),
    "cached_tokens": ("hit_tokens", "vllm:prefix_cache_hits", "lightkv:key_cached_tokens"),
    "generated_tokens": ("generated_tokens", "vllm:generation_tokens", "lightkv:key_generation_tokens"),
    "interruptions": ("num_preemptions", "vllm:num_preemptions", "lightkv:key_preemptions"),
    "num_requests": (None, "vllm:request_success", "lightkv:key_requests"),
}


class Keys:
    """The keys of a run in a file. `counts`: the requests that a limit has refused, by its name."""

    def __init__(self, folder: Path, num: int) -> None:
        self.file = folder / "keys"
        self.counts: Counter[str] = Counter()
        self._keys = [f"soak-key-{idx}" for idx in range(num)]
        lines = [f"key{idx} {key}{LIMITS[idx % len(LIMITS)]}\n" for idx, key in enumerate(self._keys)]
        self.file.write_text("".join(lines))

    def service(self, url: str, timeout: float) -> "KeyedService":
        """Returns the service at `url` for clients with these keys."""
        return KeyedService([Endpoint(url, key, timeout) for key in self._keys], self.counts)


class KeyedService:
    """A service that clients of several keys use: a request is sent by the next key that is not at a limit."""

    def __init__(self, endpoints: list[Endpoint], counts: Counter[str]) -> None:
        self._first = endpoints[0]  # which has no limits
        self._turns = itertools.cycle(endpoints)
        self._counts = counts

    async def get(self, path: str) -> Any:
        """Gets the JSON at `path`. Raises RequestFailed."""
        return await self._first.get(path)

    async def request(
        self, method: str, path: str, body: bytes = b"", max_events: int | None = None
    ) -> Reply:
        """Sends one request, as `Endpoint.request`, again where a limit refuses it."""
        while True:
            reply = await next(self._turns).request(method, path, body, max_events)
            error = json.loads(reply.body)["error"] if reply.status == 429 else {}
            if error.get("code") != "rate_limit_exceeded":
                return reply
            self._counts[error["param"]] += 1


def unequal_sums(load: Mapping[str, Any], metrics: str) -> list[str]:
    """Lists the totals of a service at rest that are not the sums of its keys' figures. `metrics`: the text of
    /metrics."""
    sums: Counter[str] = Counter()
    for name, value in re.findall(r"^(\S+)_total\{.*\} (\S+)$", metrics, re.MULTILINE):
        sums[name] += round(float(value))
    failures = []
    for figure, (total, series, of_keys) in _TOTALS.items():
        by_key = sum(used[figure] for used in load["by_key"].values())
        counts = {"/metrics": sums[series], "/metrics by key": sums[of_keys]}
        if total is not None:
            counts["/load"] = load[total]
        failures += [
            f"{figure}: {count} in {where}, and {by_key} by the keys of /load"
            for where, count in counts.items()
            if count != by_key
        ]
    if held := {name: used["held"] for name, used in load["by_key"].items() if used["held"]}:
        failures.append(f"the keys hold tokens while no request is running: {held}")
    return failures
