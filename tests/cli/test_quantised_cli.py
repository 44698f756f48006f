"""`lightkv info` with K/V in 8 and 4 bits, and the settings that are refused."""

import pytest
from typer.testing import CliRunner

from lightkv.router.cli.app import app
from tests.support.combinations import slow_cases


def run(*args: str) -> tuple[int, str, str]:
    """Returns the command's exit code, standard output and standard error."""
    result = CliRunner().invoke(app, list(args), prog_name="lightkv")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize(
    ("given", "bytes_per_token", "stored"),
    [
        (("int4",), 30 * 3 * (64 + 8), "int4"),
        (
            ("int8", "--kv-skip-layers", "0,29"),
            28 * 3 * (128 + 8) + 2 * 3 * 256,
            "int8, layers 0 and 29 in float16",
        ),
        *slow_cases((("int8-g8",), 30 * 3 * (128 + 32), "int8-g8")),
    ],
)
def test_info_is_true_for_quantised_kv(given: tuple[str, ...], bytes_per_token: int, stored: str) -> None:
    code, out, _ = run("info", "--device", "cpu", "--dtype", "float16", "--kv-dtype", *given)
    assert code == 0
    assert f"{bytes_per_token:,} bytes: 30 layers x 3 K/V heads x (64 + 64) in {stored}\n" in out
    assert f"32,768 tokens in {32_769 * bytes_per_token / 2**30:.2f} GiB" in out


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (("--kv-dtype", "int9"), "'int9' is no K/V format; choose one of auto, int8"),
        (("--kv-skip-layers", "first"), "give layers, counted from 0"),
        (("--kv-dtype", "int8-g48"), "heads of 64 K dims do not fit 48 elements"),
        (("--kv-dtype", "int8", "--kv-skip-layers", "30"), "the model has 30, counted from 0"),
        (("--kv-dtype", "fp8-static"), "choose --kv-dtype int8, which computes its scales"),
    ],
)
def test_a_format_that_cannot_be_is_refused(given: tuple[str, ...], told: str) -> None:
    code, out, err = run("info", "--device", "cpu", *given)
    assert (code, out) == (2, "")
    assert told in " ".join(err.split())
