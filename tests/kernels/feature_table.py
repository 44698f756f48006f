"""Records which tests run which features in which kernels: the tables of docs/kernels.md are made from it."""

from collections.abc import Callable
from typing import TypeVar

Test = TypeVar("Test", bound=Callable[..., None])

_tests: dict[tuple[str, str], list[str]] = {}  # (feature, column) → tests


def covers(feature: str, *columns: str) -> Callable[[Test], Test]:
    """Says of a test that it compares `feature` with a reference, in each kernel or layout of `columns`."""

    def record(test: Test) -> Test:
        for column in columns:
            names = _tests.setdefault((feature, column), [])
            if test.__name__ not in names:
                names.append(test.__name__)
        return test

    return record


def made_table(title: str, features: list[str], columns: list[str]) -> list[str]:
    """Returns a table in Markdown with a row for each feature, and the tests that cover it in the last
    column."""
    lines = [f"| {title} | {' | '.join(columns)} | tested by |", "|---|" + "---|" * (len(columns) + 1)]
    for feature in features:
        found = [_tests.get((feature, column), []) for column in columns]
        names = dict.fromkeys(f"`{name}`" for tests in found for name in tests)
        cells = ["yes" if tests else "–" for tests in found]
        lines.append(f"| {feature} | {' | '.join(cells)} | {', '.join(names)} |")
    return lines


def covered_features() -> set[str]:
    """Returns the features that some test covers."""
    return {feature for feature, _ in _tests}
