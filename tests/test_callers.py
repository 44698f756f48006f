"""Every public definition has a caller: its name is used in product code, in a document, or in an `__all__`.

A definition that only tests use is theirs, and one that nothing uses goes. Names are compared as words, so a
name that another definition has, too, counts as used.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = ("triton_kernels", "lightkv", "router")
DOCUMENTS = ("README.md", "docs/*.md", "lightkv/**/*.md", "bench/README.md")
GENERATED = {"api.md"}  # lists every public name
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
WITH_DOCSTRING = (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)

# Called by a library, or by a process, under a name that it gives.
CALLED_BY = {
    "asyncio": "connection_made connection_lost data_received pause_writing resume_writing",
    "click": "invoke",
    "fastapi": "openapi",
    "h11": "next_event maybe_extract_lines send_400_response handle_events",
    "the router's calls of a worker": "exposed_start exposed_step exposed_flush "
    "exposed_capture exposed_check exposed_map",
    "torch": "extra_repr",
    "transformers": "batch_repeat_interleave batch_select_indices crop get_mask_sizes get_max_length "
    "get_seq_length lazy_initialization",
    "uvicorn": "capture_signals startup",
}
BY_LIBRARIES = {name for names in CALLED_BY.values() for name in names.split()}
CONTRACTS = ROOT / "lightkv" / "contracts"  # have the names of what they stand in for


def product_files() -> Iterator[Path]:
    """Yields the source files of the product, each once."""
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            if path.resolve() == path:  # not through a link to another room
                yield path


def defining_files() -> Iterator[Path]:
    """Yields those of them that have names of their own."""
    return (path for path in product_files() if not path.is_relative_to(CONTRACTS))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def words_of(path: Path) -> Counter[str]:
    return Counter(words(path.read_text()))


def is_used(name: str, path: Path, node: Definition) -> bool:
    """Whether a name is used outside this definition of the file: recursion is no call."""
    if used()[name] > words_of(path)[name]:
        return True
    return used()[name] > sum(used_name == name for used_name in used_in(ast.walk(node)))


def words(text: str) -> list[str]:
    return re.findall(r"[A-Za-z_]\w*", text)


def used_in(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yields the names that code uses, which are not those that it defines; and the words of its strings, other
    than docstrings. The nodes have the order of `ast.walk`: what holds a docstring comes before it."""
    docstrings = set()
    for node in nodes:
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.keyword):
            if node.arg:
                yield node.arg
        elif isinstance(node, ast.Constant):
            if isinstance(node.value, str) and id(node) not in docstrings:
                yield from words(node.value)
        elif isinstance(node, WITH_DOCSTRING) and node.body and isinstance(node.body[0], ast.Expr):
            docstrings.add(id(node.body[0].value))


def examples_in(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yields the words of the examples in docstrings."""
    for node in nodes:
        if isinstance(node, WITH_DOCSTRING) and (text := ast.get_docstring(node)):
            for line in text.splitlines():
                if line.lstrip().startswith((">>>", "...")):
                    yield from words(line)


@cache
def used() -> Counter[str]:
    """Returns how often each name is used in product code and its examples, and in documents."""
    found: Counter[str] = Counter()
    for path in product_files():
        nodes = list(ast.walk(tree_of(path)))
        found.update(used_in(nodes))
        found.update(examples_in(nodes))
    for pattern in DOCUMENTS:
        for path in ROOT.glob(pattern):
            if path.name not in GENERATED:
                found.update(words(path.read_text()))
    return found


def definitions(body: list[ast.stmt]) -> Iterator[Definition]:
    """Yields the public functions and classes of a module, and the public methods of classes."""
    for node in body:
        if isinstance(node, Definition) and not node.name.startswith("_"):
            yield node
        if isinstance(node, ast.ClassDef):
            yield from definitions(node.body)


def test_every_public_definition_has_a_caller() -> None:
    unused = []
    for path in defining_files():
        is_kernel = path.is_relative_to(ROOT / "triton_kernels")
        for node in definitions(tree_of(path).body):
            # A kernel's reference says what it computes, and tests compare them.
            known = node.name in BY_LIBRARIES or (is_kernel and node.name.endswith("_reference"))
            if not known and not is_used(node.name, path, node):
                unused.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}")
    assert not unused, "\n".join(["nothing uses these; give them a caller, or remove them:", *unused])


def test_every_option_of_a_function_is_given_somewhere() -> None:
    """An option is a parameter that only its name can give, as tests alone may do, too."""
    unused = []
    for path in defining_files():
        if path.is_relative_to(ROOT / "router" / "cli"):  # click gives them
            continue
        for node in definitions(tree_of(path).body):
            if isinstance(node, ast.ClassDef):
                continue
            for option in node.args.kwonlyargs:
                if not is_used(option.arg, path, node):
                    unused.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}({option.arg})")
    assert not unused, "\n".join(["nothing gives these; give them a caller, or remove them:", *unused])
