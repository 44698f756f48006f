"""Answers of load clients that arrive at regular times."""

from bench.serving.load_client import Answer


def decoding(
    first: float, num: int, step: float = 0.1, prompt: int = 10, pieces: int | None = None
) -> Answer:
    """Returns an answer of `num` tokens with one piece per `step` seconds, or with `pieces` pieces."""
    arrivals = [first + step * i for i in range(pieces or num)]
    return Answer(0.0, arrivals, arrivals[-1], prompt, num, "")
