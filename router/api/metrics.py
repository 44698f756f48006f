"""The service's metrics in Prometheus' text format, under vLLM's names where vLLM has the same metric.

Counts of tokens and requests come from the router's latest status. Times are observed here, in the API process.
While the router is silent, its gauges are left out, because they describe the present.
"""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric

from lightkv.router.service.log_stream import num_dropped_lines
from lightkv.router.service.router_client import LatestStatus

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_TTFT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160)
_INTER_TOKEN_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 10)
_E2E_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640, 1280)
# vLLM's, for the parts of a request's time; and 1, 2 and 5 times each power of ten, for its tokens.
_PART_BUCKETS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_TOKEN_BUCKETS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))

# Name, description, and the router's count, by its name.
_GAUGES = (
    ("vllm:num_requests_running", "Requests admitted and not finished.", "num_running"),
    ("vllm:num_requests_waiting", "Requests not admitted yet.", "num_waiting"),
    (
        "lightkv:requests_guaranteed",
        "Those of the running requests that are never preempted, because their max_tokens fit the pool.",
        "num_guaranteed",
    ),
    (
        "lightkv:requests_provisional",
        "Those of the running requests that give way when the pool runs short.",
        "num_provisional",
    ),
    (
        "lightkv:waiting_tokens",
        "Tokens of the prompts that wait for admission, and of what preempted requests had generated.",
        "waiting_tokens",
    ),
    (
        "vllm:kv_cache_usage_perc",
        "Share of the pool that running requests hold (1 means all of it).",
        "held_share",
    ),
    (
        "lightkv:capacity_tokens",
        "Slots of the pool: a token takes one, or several where some layers see a window only.",
        "capacity",
    ),
    ("lightkv:free_tokens", "Free slots of the pool.", "free"),
    ("lightkv:held_tokens", "Slots that running requests hold.", "held"),
    ("lightkv:cached_tokens", "Slots of tokens that are cached for later requests.", "cached"),
    (
        "lightkv:forecast_peak_tokens",
        "The most slots that the running requests are expected to come to hold.",
        "forecast_peak",
    ),
    (
        "lightkv:guaranteed_peak_tokens",
        "The most slots that the guaranteed requests may come to hold; at most the capacity.",
        "guaranteed_peak",
    ),
    ("lightkv:reached_peak_tokens", "The most slots held in any step so far.", "reached_peak"),
    ("lightkv:states", "State slots of recurrent layers.", "num_states"),
    ("lightkv:free_states", "Free state slots.", "free_states"),
    ("lightkv:held_states", "State slots of running requests, and snapshots that these read.", "held_states"),
    ("lightkv:cached_states", "Snapshots of states that are cached for later requests.", "cached_states"),
    ("lightkv:sessions", "Sessions that protect tokens.", "num_sessions"),
    (
        "lightkv:session_tokens",
        "Tokens, cached or held, that sessions protect: they are evicted last.",
        "session_tokens",
    ),
    ("lightkv:step_age_seconds", "Seconds since the last step completed, while work waits.", "step_age"),
)
_COUNTERS = (
    ("vllm:prompt_tokens", "Prompt tokens of admitted requests.", "prompt_tokens"),
    ("vllm:generation_tokens", "Tokens generated.", "generated_tokens"),
    (
        "vllm:num_preemptions",
        "Preemptions of running requests, all of them provisional ones.",
        "num_preemptions",
    ),
    ("lightkv:recomputed_tokens", "Tokens computed again after preemptions.", "recomputed_tokens"),
    ("vllm:prefix_cache_queries", "Prompt tokens looked up in the cache.", "prompt_tokens"),
    ("vllm:prefix_cache_hits", "Prompt tokens found in the cache.", "hit_tokens"),
    (
        "lightkv:session_evicted_tokens",
        "Tokens that were evicted although a session protected them.",
        "session_evicted_tokens",
    ),
    (
        "lightkv:session_over_share_tokens",
        "Tokens that sessions do not protect because all sessions together exceeded their share.",
        "session_over_share_tokens",
    ),
    ("lightkv:steps", "Steps of the model.", "num_steps"),
    (
        "lightkv:ledger_checks",
        "Comparisons of the device's count of free slots with the ledger's.",
        "num_ledger_checks",
    ),
    ("lightkv:worker_starts", "Starts of the worker process.", "num_worker_starts"),
    ("lightkv:router_seconds", "Time that the router itself spent in steps.", "router_seconds"),
)
# Of each API key, by its name: the series, its description and the field of `KeyUsage`.
_BY_KEY = (
    ("requests", "Answers that were queued.", "num_requests"),
    ("prompt_tokens", "Prompt tokens of admitted requests.", "prompt_tokens"),
    ("cached_tokens", "Prompt tokens found in the cache.", "cached_tokens"),
    ("generation_tokens", "Tokens generated.", "generated_tokens"),
    ("preemptions", "Preemptions of running requests.", "interruptions"),
)


class ServiceMetrics:
    """All metrics of one service. `latest` returns the router's latest status.

    An `AnswerClock` (answers/generation.py) updates the histograms `ttft`, `inter_token`, `e2e`, `queue`,
    `prefill` and `decode` (seconds), `prompt_tokens`, `generation_tokens` and `max_tokens` (tokens), and the
    counter `finished`.
    """

    def __init__(self, model: str, latest: Callable[[], LatestStatus]) -> None:
        registry = CollectorRegistry()

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            family = Histogram(name, text, ["model_name"], buckets=buckets, registry=registry)
            return family.labels(model)

        self._registry = registry
        self.ttft = histogram(
            "vllm:time_to_first_token_seconds", "Time from a request to its first token.", _TTFT_BUCKETS
        )
        self.inter_token = histogram(
            "vllm:inter_token_latency_seconds", "Time from one token to the next.", _INTER_TOKEN_BUCKETS
        )
        self.e2e = histogram(
            "vllm:e2e_request_latency_seconds", "Time from a request to its end.", _E2E_BUCKETS
        )
        self.queue = histogram(
            "vllm:request_queue_time_seconds", "Time from a request to its admission.", _PART_BUCKETS
        )
        self.prefill = histogram(
            "vllm:request_prefill_time_seconds",
            "Time from a request's admission to its first token.",
            _PART_BUCKETS,
        )
        self.decode = histogram(
            "vllm:request_decode_time_seconds",
            "Time from a request's first token to its last one.",
            _PART_BUCKETS,
        )
        self.prompt_tokens = histogram(
            "vllm:request_prompt_tokens", "Tokens of a request's prompt.", _TOKEN_BUCKETS
        )
        self.generation_tokens = histogram(
            "vllm:request_generation_tokens", "Tokens of a request's answer.", _TOKEN_BUCKETS
        )
        self.max_tokens = histogram(
            "vllm:request_params_max_tokens", "The most tokens that a request may generate.", _TOKEN_BUCKETS
        )
        self.finished = Counter(
            "vllm:request_success",
            "Answers that have ended, by the reason.",
            ["model_name", "finished_reason"],
            registry=registry,
        )
        self.model = model
        registry.register(_RouterCollector(model, latest))

    def text(self) -> bytes:
        """Returns all metrics in Prometheus' text format (`CONTENT_TYPE`)."""
        return generate_latest(self._registry)


class _RouterCollector:
    """Collects the router's counts, and what the logs of both processes have lost, at each scrape."""

    def __init__(self, model: str, latest: Callable[[], LatestStatus]) -> None:
        self._model = model
        self._latest = latest

    def collect(self) -> Iterator[Metric]:
        latest = self._latest()
        load = latest.status.load
        if not latest.is_silent:
            for name, text, count in _GAUGES:
                yield self._gauge(name, text, getattr(load, count))
        for name, text, count in _COUNTERS:
            counter = CounterMetricFamily(name, text, labels=["model_name"])
            counter.add_metric([self._model], getattr(load, count))
            yield counter
        for name, text, count in _BY_KEY if load.by_key else ():
            counts = {key: getattr(usage, count) for key, usage in load.by_key.items()}
            yield self._by(CounterMetricFamily, f"lightkv:key_{name}", text, "key", counts)
        if load.by_key and not latest.is_silent:
            text = "Tokens that running requests hold; a shared one counts in each."
            held = {key: usage.held for key, usage in load.by_key.items()}
            yield self._by(GaugeMetricFamily, "lightkv:key_held_tokens", text, "key", held)
        yield self._gauge("lightkv:ready", "Whether requests are accepted.", float(latest.takes_requests))
        yield self._gauge(
            "lightkv:router_silence_seconds", "Seconds since the router last reported.", latest.age
        )
        text = "Lines of a process's log that were dropped, because nothing read them in time."
        dropped = {"api": num_dropped_lines(), "router": load.num_dropped_log_lines}
        yield self._by(CounterMetricFamily, "lightkv:log_dropped_lines", text, "process", dropped)
        info = latest.status.info
        if info is not None:
            family = InfoMetricFamily(
                "vllm:cache_config", "The K/V pool; its blocks are slots.", labels=["model_name"]
            )
            config = {
                "block_size": "1",
                "num_gpu_blocks": str(info.capacity),
                "cache_dtype": info.kv_type,
                "pool_bytes": str(info.pool_bytes),
                "bytes_per_token": str(info.bytes_per_token),
                "num_states": str(info.num_states),
                "bytes_per_state": str(info.bytes_per_state),
            }
            family.add_metric([self._model], config)
            yield family
            text = "Layers that run transformers' own code, by what of them does and why."
            yield self._by(GaugeMetricFamily, "lightkv:unfused_layers", text, "why", info.unfused)

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        gauge = GaugeMetricFamily(name, text, labels=["model_name"])
        gauge.add_metric([self._model], value)
        return gauge

    def _by(
        self,
        family: type[CounterMetricFamily | GaugeMetricFamily],
        name: str,
        text: str,
        label: str,
        values: Mapping[str, float],
    ) -> Metric:
        """Returns the metric of these values, each under its own value of `label`."""
        metric = family(name, text, labels=["model_name", label])
        for of, value in values.items():
            metric.add_metric([self._model, of], value)
        return metric
