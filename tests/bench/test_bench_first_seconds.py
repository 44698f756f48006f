"""The figures of a service's first seconds."""

import pytest

from bench.serving.first_seconds import figures
from bench.serving.load_client import Answer


def test_figures_count_the_pieces_of_whole_seconds() -> None:
    answers = [Answer(10.0, [10.5 + 0.1 * i for i in range(10)], 11.5, 4, 10, "")]
    answers.append(Answer(10.0, [11.75, 12.0], 12.0, 4, 2, ""))
    found = figures(answers, 10.0, 2.5)
    assert found["by_second"] == [5, 6]
    assert found["tokens_per_second"] == 5.5
    assert found["longest_between_tokens_ms"] == pytest.approx(250.0)
    assert found["first_token_p50_ms"] == pytest.approx(1750.0)
