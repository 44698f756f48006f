"""The benchmark of what the service adds: a real service around a scripted device."""

from pathlib import Path

from bench.serving import host_path
from bench.serving.scripted_service import Script, scripted_service
from lightkv.router.config import EngineConfig
from lightkv.router.engine.step import StepPlan
from lightkv.router.model_files import resolve
from lightkv.router.sampling_params import SamplerKind


def test_it_measures_first_tokens_and_loads() -> None:
    options = host_path.arguments(["--prompt", "16", "--output", "4", "--requests", "1", "--pause", "0"])
    script = Script(decode_ms=1.0, prompt_ms=32.0, check_ms=3000.0)
    directory = Path(resolve(EngineConfig.model, report=lambda line: None))
    with scripted_service(script, directory) as service:
        bench = host_path.Bench(service, script, options)
        first = bench.first_tokens(3)
        assert first["added_ms"]["low"] > 0
        assert first["added_ms"]["high"] < script.check_ms  # no recount of the memory comes between requests
        assert set(first["cpu_ms"]) == set(host_path.ROLES)
        load = bench.load(4)
        assert load["requests"] == 4
        assert 1.0 <= load["tokens_per_piece"] <= 4.0
        # A busy machine may bring the 4 tokens of every answer in one piece, with no time between them.
        assert (load["between_ms"] > 0) == (load["tokens_per_piece"] < 4.0)


def test_a_step_takes_what_the_script_says() -> None:
    def plan(counts: list[int], num_prefills: int) -> StepPlan:
        rows = list(range(1, len(counts) + 1))
        return StepPlan(
            1, b"", rows, [0] * len(rows), counts, num_prefills, b"", [], SamplerKind.GREEDY, {}, [], 0
        )

    script = Script(decode_ms=5.0, row_ms=0.5, prompt_ms=13.0)
    assert script.step_ms(plan([256, 1, 1], 1)) == 5.0 + 1.0 + 6.5
    assert script.step_ms(plan([512], 1)) == 13.0
