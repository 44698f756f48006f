"""Says which tests run which features in which kernels: the tables of docs/kernels.md are made from it."""

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

Test = TypeVar("Test", bound=Callable[..., None])
TESTS = Path(__file__).parents[2] / "kernels"


def covers(feature: str, *columns: str) -> Callable[[Test], Test]:
    """Says of a test that it compares `feature` with a reference, in each kernel or layout of `columns`. It
    changes nothing; `covered` reads it in the sources."""
    return lambda test: test


def covered() -> dict[tuple[str, str], list[str]]:
    """Returns the names of the tests in tests/kernels that cover each feature in each column."""
    tests: dict[tuple[str, str], list[str]] = {}
    for test, (feature, *columns) in _decorated("covers"):
        for column in columns:
            names = tests.setdefault((feature, column), [])
            if test not in names:
                names.append(test)
    return tests


def named_by(decorator: str) -> dict[str, str]:
    """Returns the names of the tests in tests/kernels that have this decorator, by its first argument."""
    return {first: test for test, (first, *_) in _decorated(decorator)}


def _decorated(decorator: str) -> Iterator[tuple[str, list[str]]]:
    """Yields the names of the tests that have this decorator, and the strings it is given."""
    for file in sorted(TESTS.glob("test_*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            for call in getattr(node, "decorator_list", []):
                if isinstance(call, ast.Call) and ast.unparse(call.func) == decorator:
                    yield node.name, [arg.value for arg in call.args if isinstance(arg, ast.Constant)]


def made_table(title: str, features: list[str], columns: list[str]) -> list[str]:
    """Returns a table in Markdown with a row for each feature, and the tests that cover it in the last
    column."""
    tests = covered()
    lines = [f"| {title} | {' | '.join(columns)} | tested by |", "|---|" + "---|" * (len(columns) + 1)]
    for feature in features:
        found = [tests.get((feature, column), []) for column in columns]
        named = dict.fromkeys(f"`{name}`" for names in found for name in names)
        cells = ["yes" if names else "–" for names in found]
        lines.append(f"| {feature} | {' | '.join(cells)} | {', '.join(named)} |")
    return lines
