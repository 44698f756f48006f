"""OpenPPL's MultiHeadCacheAttention against its authors' torch code: recorded outputs of a sample of the grid,
and with `--ppl-pmx CHECKOUT` the code itself, on all of the grid and on random batches."""

import itertools
import random
from pathlib import Path

import pytest
import torch

from lightkv.contracts.openppl import multi_head_cache_attention
from tests.support.combinations import covering_pairs
from tests.support.contracts.openppl_authors import (
    BITS,
    COUNTS,
    DTYPES,
    MASKS,
    PAST,
    Operator,
    load_operator,
    recorded,
    run,
    sample,
)
from tests.support.contracts.openppl_checks import PLACES, same_bytes
from tests.support.contracts.openppl_reference import Batch, Place, Setting

TOLERANCE = {  # both sides round: theirs also slopes, masks and weights, to the type of the query
    torch.float32: {"rtol": 2e-5, "atol": 2e-5},
    torch.float16: {"rtol": 4e-3, "atol": 4e-3},
}
SAMPLE = sample()


def choices_of(batch: Batch) -> tuple[torch.dtype, int, bool, bool, str, int]:
    """What the result of a batch depends on."""
    setting = batch.setting
    return (
        setting.dtype,
        setting.quant_bit,
        setting.is_alibi,
        setting.is_causal,
        setting.mask,
        batch.decoding,
    )


QUICK = covering_pairs([choices_of(batch) for batch in SAMPLE.values()])
NAMES = [
    pytest.param(name, marks=() if choices_of(batch) in QUICK else pytest.mark.slow)
    for name, batch in SAMPLE.items()
]


@pytest.mark.parametrize("name", NAMES)
def test_the_recorded_sample(name: str) -> None:
    batch = SAMPLE[name]
    expected = torch.from_numpy(recorded()[name])
    for place in PLACES[::5]:
        out = multi_head_cache_attention(**batch.arguments(place))
        torch.testing.assert_close(out, expected, **TOLERANCE[out.dtype])


def test_the_sample_has_every_pair_of_what_the_result_depends_on() -> None:
    found = [
        (one.setting.dtype, one.setting.quant_bit, one.setting.is_alibi, one.setting.is_causal, one.decoding)
        for one in SAMPLE.values()
    ]
    choices = (DTYPES, BITS, (False, True), (False, True), (0, 2, 3, 4))
    for first, second in itertools.combinations(range(len(choices)), 2):
        pairs = {(one[first], one[second]) for one in found}
        assert pairs == set(itertools.product(choices[first], choices[second]))
    assert {(one.setting.mask, one.setting.quant_bit) for one in SAMPLE.values()} == set(
        itertools.product(MASKS, BITS)
    )
    assert set(recorded()) == set(SAMPLE)


# --------------------------------------------------------------------------------
# The code itself


@pytest.fixture(scope="module")
def authors(request: pytest.FixtureRequest) -> Operator:
    checkout = request.config.getoption("ppl_pmx")
    if checkout is None:
        pytest.skip("needs --ppl-pmx CHECKOUT, a checkout of OpenPPL/ppl.pmx")
    return load_operator(Path(checkout))


def compare(authors: Operator, batch: Batch, places: list[Place], backend: str | None = None) -> None:
    """Compares output, cache and scales with the authors'."""
    for place in places:
        expected, theirs = run(authors, batch, place)
        ours = batch.arguments(place)
        out = multi_head_cache_attention(**ours, backend=backend)
        torch.testing.assert_close(out, expected, **TOLERANCE[out.dtype])
        assert same_bytes(ours["cache"], theirs["cache"]), place
        assert same_bytes(ours["scale"], theirs["scale"]), place


@pytest.mark.slow
@pytest.mark.parametrize(
    ("alibi", "causal", "mask"), list(itertools.product((False, True), (False, True), MASKS)), ids=str
)
def test_the_grid(authors: Operator, alibi: bool, causal: bool, mask: str) -> None:
    for dtype, bits, decoding in itertools.product(DTYPES, BITS, range(5)):
        setting = Setting(dtype, bits, is_alibi=alibi, is_causal=causal, mask=mask)
        compare(authors, Batch(PAST, COUNTS, decoding, setting), PLACES)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_random_batches(authors: Operator, backend: str) -> None:
    drawn = random.Random(0)
    for seed in range(400 if backend == "torch" else 40):
        heads, kv_heads = drawn.choice([(4, 2), (1, 1), (6, 3), (12, 4), (5, 5)])
        setting = Setting(
            drawn.choice(DTYPES),
            drawn.choice(BITS),
            drawn.choice([4, 8, 16]),
            drawn.random() < 0.5,
            drawn.random() < 0.5,
            drawn.choice(MASKS),
            heads,
            kv_heads,
            drawn.choice([16, 32, 48]),
        )
        size = drawn.randint(1, 5)
        past = [drawn.randint(0, 20) for _ in range(size)]
        counts = [drawn.choice([1, 1, 2, 3, 7]) for _ in range(size)]
        batch = Batch(past, counts, drawn.randint(0, size), setting, seed=seed)
        place = Place(drawn.randrange(4), drawn.choice([0, 1, 3, 16]), 3, drawn.randrange(3))
        compare(authors, batch, [place], backend)
