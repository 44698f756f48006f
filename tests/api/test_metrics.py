"""The service's metrics: their names, their values, and when they change."""

import re

import pytest

from lightkv.router.api.answers.generation import AnswerClock
from lightkv.router.api.metrics import ServiceMetrics
from lightkv.router.engine.step import Limits, RunnerInfo
from lightkv.router.service.access.key_usage import KeyUsage
from lightkv.router.service.messages import Load, Status
from lightkv.router.service.router_client import LatestStatus

INFO = RunnerInfo(
    architecture="LlamaForCausalLM",
    device="cpu",
    dtype="float32",
    attention_backend="torch",
    cuda_graphs=False,
    capacity=1000,
    bytes_per_token=4,
    pool_bytes=4000,
    pool_reason="given",
    limits=Limits(max_num_seqs=8, max_model_len=512, prefill_chunk=64, vocab_size=100),
    unfused={"GPT2Block: it has no plan": 12},
)
LOAD = Load(
    capacity=1000,
    free=600,
    held=250,
    cached=150,
    forecast_peak=400,
    guaranteed_peak=350,
    reached_peak=300,
    num_running=3,
    num_waiting=2,
    num_guaranteed=1,
    waiting_tokens=170,
    num_steps=11,
    prompt_tokens=500,
    hit_tokens=120,
    generated_tokens=77,
    num_preemptions=4,
    recomputed_tokens=33,
    num_sessions=5,
    session_tokens=90,
    session_evicted_tokens=7,
    session_over_share_tokens=13,
    num_ledger_checks=10,
    num_worker_starts=1,
    step_age=0.5,
    router_seconds=0.25,
    num_dropped_log_lines=6,
    by_key={"alice": KeyUsage(2, 50, 40, 8, 1, held=30)},
)


def values(metrics: ServiceMetrics) -> dict[str, float]:
    """Returns all samples by name, with their labels except the model's."""
    samples = {}
    for line in metrics.text().decode().splitlines():
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            name = re.sub(r',?model_name="m"', "", name).replace("{,", "{").replace("{}", "")
            samples[name] = float(value)
    return samples


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("vllm:num_requests_running", 3),
        ("vllm:num_requests_waiting", 2),
        ("lightkv:requests_guaranteed", 1),
        ("lightkv:requests_provisional", 2),
        ("lightkv:waiting_tokens", 170),
        ("vllm:kv_cache_usage_perc", 0.25),
        ("vllm:prompt_tokens_total", 500),
        ("vllm:generation_tokens_total", 77),
        ("vllm:num_preemptions_total", 4),
        ("vllm:prefix_cache_queries_total", 500),
        ("vllm:prefix_cache_hits_total", 120),
        ("lightkv:capacity_tokens", 1000),
        ("lightkv:free_tokens", 600),
        ("lightkv:held_tokens", 250),
        ("lightkv:cached_tokens", 150),
        ("lightkv:forecast_peak_tokens", 400),
        ("lightkv:guaranteed_peak_tokens", 350),
        ("lightkv:reached_peak_tokens", 300),
        ("lightkv:sessions", 5),
        ("lightkv:session_tokens", 90),
        ("lightkv:session_evicted_tokens_total", 7),
        ("lightkv:session_over_share_tokens_total", 13),
        ("lightkv:ledger_checks_total", 10),
        ("lightkv:steps_total", 11),
        ("lightkv:recomputed_tokens_total", 33),
        ("lightkv:worker_starts_total", 1),
        ("lightkv:step_age_seconds", 0.5),
        ("lightkv:router_seconds_total", 0.25),
        ('lightkv:log_dropped_lines_total{process="router"}', 6),
        ('lightkv:log_dropped_lines_total{process="api"}', 0),
        ("lightkv:ready", 1),
        ('lightkv:key_requests_total{key="alice"}', 2),
        ('lightkv:key_prompt_tokens_total{key="alice"}', 50),
        ('lightkv:key_cached_tokens_total{key="alice"}', 40),
        ('lightkv:key_generation_tokens_total{key="alice"}', 8),
        ('lightkv:key_preemptions_total{key="alice"}', 1),
        ('lightkv:key_held_tokens{key="alice"}', 30),
        ('lightkv:unfused_layers{why="GPT2Block: it has no plan"}', 12),
    ],
)
def test_the_routers_counts_are_reported(name: str, value: float) -> None:
    assert (
        values(ServiceMetrics("m", lambda: LatestStatus(Status("ready", "", LOAD, INFO), 0.0)))[name] == value
    )


def test_the_pool_is_described() -> None:
    text = ServiceMetrics("m", lambda: LatestStatus(Status("ready", "", LOAD, INFO), 0.0)).text().decode()
    line = next(line for line in text.splitlines() if line.startswith("vllm:cache_config_info"))
    assert 'block_size="1"' in line
    assert 'num_gpu_blocks="1000"' in line


def test_before_the_model_is_loaded_nothing_divides_by_zero() -> None:
    samples = values(ServiceMetrics("m", lambda: LatestStatus(Status("starting", "", Load()), 0.0)))
    assert samples["vllm:kv_cache_usage_perc"] == 0
    assert samples["lightkv:ready"] == 0
    assert not [name for name in samples if name.startswith("vllm:cache_config_info")]


def test_gauges_of_a_silent_router_are_not_reported() -> None:
    """The service is not ready, and gauges are left out, which Prometheus treats as unknown. Counters stay."""
    quiet, silent = (
        values(ServiceMetrics("m", lambda age=age: LatestStatus(Status("ready", "", LOAD, INFO), age)))
        for age in (1.0, 6.0)
    )
    assert quiet["lightkv:ready"] == 1
    assert silent["lightkv:ready"] == 0
    assert silent["lightkv:router_silence_seconds"] == 6
    gauges = {"vllm:num_requests_running", "vllm:kv_cache_usage_perc", "lightkv:free_tokens"}
    gauges.add('lightkv:key_held_tokens{key="alice"}')
    assert gauges <= quiet.keys()
    assert not gauges & silent.keys()
    assert silent["vllm:generation_tokens_total"] == quiet["vllm:generation_tokens_total"]


def test_late_steps_are_not_ready() -> None:
    late = LatestStatus(Status("ready", "", Load(step_age=31.0), INFO), 0.1)
    assert values(ServiceMetrics("m", lambda: late))["lightkv:ready"] == 0
    assert not late.takes_requests


def test_metrics_come_from_the_latest_status() -> None:
    statuses = [Status("ready", "", Load(num_running=1)), Status("ready", "", Load(num_running=5))]
    metrics = ServiceMetrics("m", lambda: LatestStatus(statuses.pop(0), 0.0))
    assert [values(metrics)["vllm:num_requests_running"] for _ in range(2)] == [1, 5]


def test_an_answer_is_timed_from_its_beginning_to_its_end() -> None:
    metrics = ServiceMetrics("m", lambda: LatestStatus(Status("ready", "", LOAD), 0.0))
    clock = AnswerClock(metrics, num_prompt=30, max_tokens=4)
    clock.begun -= 2
    clock.waited = 0.75
    for _ in range(4):
        clock.token()
    clock.finish("length")
    samples = values(metrics)
    assert samples["vllm:time_to_first_token_seconds_count"] == 1
    assert samples["vllm:inter_token_latency_seconds_count"] == 3
    assert samples["vllm:e2e_request_latency_seconds_count"] == 1
    assert samples['vllm:request_success_total{finished_reason="length"}'] == 1
    for name in ("queue_time_seconds", "prefill_time_seconds", "decode_time_seconds"):
        assert samples[f"vllm:request_{name}_count"] == 1
    assert samples["vllm:request_queue_time_seconds_sum"] == 0.75
    parts = [samples[f"vllm:request_{name}_time_seconds_sum"] for name in ("queue", "prefill", "decode")]
    assert parts[1] >= 1.25
    assert sum(parts) <= samples["vllm:e2e_request_latency_seconds_sum"] + 1e-9
    for name, value in (("prompt_tokens", 30), ("generation_tokens", 4), ("params_max_tokens", 4)):
        assert samples[f"vllm:request_{name}_sum"] == value
    assert samples['vllm:request_prompt_tokens_bucket{le="20.0"}'] == 0
    assert samples['vllm:request_prompt_tokens_bucket{le="50.0"}'] == 1
    assert samples["vllm:time_to_first_token_seconds_sum"] >= 0
    assert samples["vllm:time_to_first_token_seconds_sum"] <= samples["vllm:e2e_request_latency_seconds_sum"]


def test_an_answer_without_a_token_has_sizes_and_no_phases() -> None:
    metrics = ServiceMetrics("m", lambda: LatestStatus(Status("ready", "", LOAD), 0.0))
    AnswerClock(metrics, num_prompt=30, max_tokens=4).finish("lost")
    samples = values(metrics)
    assert samples["vllm:request_generation_tokens_count"] == 1
    assert samples["vllm:request_generation_tokens_sum"] == 0
    assert samples["vllm:request_queue_time_seconds_count"] == 0


def test_two_services_in_one_process_share_nothing() -> None:
    first, second = (
        ServiceMetrics("m", lambda: LatestStatus(Status("ready", "", LOAD), 0.0)) for _ in range(2)
    )
    AnswerClock(first, 1, 1).finish("stop")
    assert 'vllm:request_success_total{finished_reason="stop"}' in values(first)
    assert 'vllm:request_success_total{finished_reason="stop"}' not in values(second)
