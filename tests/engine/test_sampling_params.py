"""Tests of sampling parameters: ranges, kinds, the children of one request, and encoding."""

import math
from typing import Any

import msgspec
import pytest

from lightkv.errors import LightKVError
from lightkv.router.sampling_params import (
    MAX_LOGIT_BIAS,
    MAX_STOP_TOKEN_IDS,
    InvalidParams,
    SamplerKind,
    SamplingParams,
)

NAN, INF = math.nan, math.inf

REFUSED: list[tuple[str, Any]] = [
    *[("max_tokens", v) for v in (0, -1, 2**31, 1.0, True, None)],
    *[("min_tokens", v) for v in (-1, 257, 1.0, True, None)],  # max_tokens is 256 by default
    *[("temperature", v) for v in (-0.1, NAN, INF, 10**400, 1e39, True, "1", None)],
    *[("top_k", v) for v in (-2, 2**31, 5.0, True)],
    *[("top_p", v) for v in (0, 0.0, -0.5, 1.0001, NAN, INF, False)],
    *[("min_p", v) for v in (-0.1, 1.1, NAN, -INF)],
    *[("repetition_penalty", v) for v in (0, -1.0, 0.009, 101, NAN, INF)],
    *[("presence_penalty", v) for v in (-2.01, 2.01, NAN, INF)],
    *[("frequency_penalty", v) for v in (-2.01, 2.01, NAN, INF)],
    *[("logit_bias", v) for v in ({-1: 1.0}, {"1": 1.0}, {True: 1.0}, {2**31: 1.0}, [(1, 1.0)])],
    ("logit_bias", dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1.0)),
    *[("logit_bias", {7: v}) for v in (-100.5, 100.5, NAN, INF, None)],
    *[("logprobs", v) for v in (-1, 21, 5.0, True)],
    *[("seed", v) for v in (2**63, -(2**63) - 1, 1.0, False)],
    *[("n", v) for v in (0, 129, 1.0, True)],
    *[("stop", v) for v in ("", ("a", ""), "x" * 1025, ("a",) * 17, (1,), 5, None, {"a": 1})],
    *[("stop_token_ids", v) for v in ((-1,), (1.0,), (True,), 5, None)],
    ("stop_token_ids", tuple(range(MAX_STOP_TOKEN_IDS + 1))),
    *[("ignore_eos", v) for v in (1, None)],
    *[("include_stop_str_in_output", v) for v in (0, "yes")],
]

ALLOWED: list[tuple[str, Any]] = [
    *[("max_tokens", v) for v in (1, 2**31 - 1)],
    *[("min_tokens", v) for v in (0, 256)],
    *[("temperature", v) for v in (0, 0.0, 1e-300, 2, 3.4e38)],
    *[("top_k", v) for v in (-1, 0, 1, 2**31 - 1)],
    *[("top_p", v) for v in (1e-9, 1, 1.0)],
    *[("min_p", v) for v in (0, 1)],
    *[("repetition_penalty", v) for v in (0.01, 1, 100)],
    *[("presence_penalty", v) for v in (-2, 2)],
    *[("frequency_penalty", v) for v in (-2.0, 2.0)],
    *[("logit_bias", v) for v in ({}, {0: -100, 2**31 - 1: 100.0})],
    ("logit_bias", dict.fromkeys(range(MAX_LOGIT_BIAS), 1.0)),
    *[("logprobs", v) for v in (None, 0, 20)],
    *[("seed", v) for v in (None, 0, -(2**63), 2**63 - 1)],
    *[("n", v) for v in (1, 128)],
    *[("stop", v) for v in ("a", "x" * 1024, (), ("a",) * 16, ["a", "b"])],
    *[("stop_token_ids", v) for v in ((), [0, 5], tuple(range(MAX_STOP_TOKEN_IDS)))],
    *[("ignore_eos", v) for v in (True, False)],
]


def short_id(value: Any) -> str:
    return value if isinstance(value, str) and 0 < len(value) < 30 else repr(value)[:24]


@pytest.mark.parametrize(("field", "value"), REFUSED, ids=short_id)
def test_a_value_out_of_range_is_refused_with_its_field(field: str, value: Any) -> None:
    with pytest.raises(InvalidParams) as caught:
        SamplingParams(**{field.split("[")[0]: value})
    assert caught.value.field == field
    message = str(caught.value)
    assert message.startswith(f"{field} is ")
    assert caught.value.allowed
    assert caught.value.allowed in message
    assert "\n" not in message
    assert len(message) < 200


@pytest.mark.parametrize(("field", "value"), ALLOWED, ids=short_id)
def test_bounds_are_allowed(field: str, value: Any) -> None:
    assert field in SamplingParams(**{field: value}).__struct_fields__


def test_invalid_params_is_an_error_of_lightkv_and_a_value_error() -> None:
    assert issubclass(InvalidParams, LightKVError)
    assert issubclass(InvalidParams, ValueError)


@pytest.mark.parametrize(
    "params",
    [SamplingParams(logit_bias={3: 1.0, 10: 1.0}), SamplingParams(stop_token_ids=(10,))],
    ids=["logit_bias", "stop_token_ids"],
)
def test_token_ids_have_to_be_in_the_vocabulary(params: SamplingParams) -> None:
    params.validate(vocab_size=11)
    with pytest.raises(InvalidParams, match="from 0 to 9"):
        params.validate(vocab_size=10)


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({}, SamplerKind.RANDOM),
        ({"temperature": 0}, SamplerKind.GREEDY),
        ({"temperature": 1e-6}, SamplerKind.GREEDY),
        ({"temperature": 0, "top_k": 5, "top_p": 0.5, "min_p": 0.1}, SamplerKind.GREEDY),
        ({"min_p": 0.1}, SamplerKind.RANDOM),
        ({"top_k": -1}, SamplerKind.RANDOM),
        ({"top_k": 5}, SamplerKind.RANDOM),
        ({"top_p": 0.9}, SamplerKind.RANDOM),
        ({"temperature": 0, "logprobs": 0}, SamplerKind.EDITED),
        ({"temperature": 0, "logit_bias": {1: 1.0}}, SamplerKind.EDITED),
        ({"temperature": 0, "repetition_penalty": 1.1, "top_k": 5, "top_p": 0.5}, SamplerKind.EDITED),
        ({"presence_penalty": 0.1}, SamplerKind.EDITED),
        ({"frequency_penalty": -0.1}, SamplerKind.EDITED),
        ({"presence_penalty": 0.1, "top_p": 0.9}, SamplerKind.EDITED),
        ({"logprobs": 0, "top_k": 5}, SamplerKind.EDITED),
    ],
    ids=str,
)
def test_kind_is_the_lowest_sufficient_one(fields: dict[str, Any], kind: SamplerKind) -> None:
    assert SamplingParams(**fields).kind == kind


def test_children_have_different_seeds_and_the_first_keeps_the_requests() -> None:
    for seed in (0, 1, 2**63 - 1, -(2**63)):
        params = SamplingParams(n=128, seed=seed, top_p=0.9)
        seeds = [params.child_seed(i) for i in range(128)]
        assert seeds[0] == seed
        assert len(set(seeds)) == 128
        for child_seed in seeds:
            SamplingParams(seed=child_seed)  # is in its range
        assert seeds == [params.child_seed(i) for i in range(128)]


def test_children_of_neighbouring_seeds_share_no_seed() -> None:
    seeds = [SamplingParams(n=128, seed=s).child_seed(i) for s in range(50) for i in range(128)]
    assert len(set(seeds)) == len(seeds)


def test_a_child_without_seed_has_none() -> None:
    assert SamplingParams(n=2).child_seed(1) is None


@pytest.mark.parametrize("codec", [msgspec.msgpack, msgspec.json], ids=["msgpack", "json"])
def test_encoding_and_decoding_change_nothing(codec: Any) -> None:
    params = SamplingParams(
        max_tokens=7, temperature=0.3, logit_bias={5: -1.5}, seed=-3, stop=["a", "é"], stop_token_ids=[2], n=3
    )
    decoded = codec.decode(codec.encode(params), type=SamplingParams)
    assert decoded == params
    assert decoded.stops == ("a", "é")


def test_decoding_refuses_wrong_values() -> None:
    with pytest.raises(msgspec.ValidationError, match=r"> 0.0 - at `\$.top_p`"):
        msgspec.json.decode(b'{"top_p": 0}', type=SamplingParams)
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(b'{"temperature": "hot"}', type=SamplingParams)


def test_one_stop_string_is_the_same_as_a_tuple_of_one() -> None:
    assert SamplingParams(stop="end") == SamplingParams(stop=("end",)) == SamplingParams(stop=["end"])


def test_params_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        SamplingParams().top_k = 1  # type: ignore[misc]
