"""Checks which rooms import which, and what no file may contain, by reading the sources."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("triton_kernels", "lightkv", "router", "bench", "tests")
PRODUCT = ("triton_kernels", "lightkv", "router")
LAYERS = {"triton_kernels": 0, "lightkv": 1, "router": 2, "bench": 3, "tests": 3}
PICKLES = {"pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}

# Each room imports itself and the rooms above it. A file's room is the longest name that begins its own.
ROOMS = (
    "lightkv.triton_kernels.layout",
    "lightkv.triton_kernels.tuning",
    "lightkv.triton_kernels.checks",
    "lightkv.triton_kernels.operators",
    "lightkv.triton_kernels.norms",
    "lightkv.triton_kernels.slots",
    "lightkv.triton_kernels.quantised",
    "lightkv.triton_kernels.write",
    "lightkv.triton_kernels.attention",
    "lightkv.triton_kernels.classic",
    "lightkv.triton_kernels",
    "lightkv.errors",
    "lightkv.counts",
    "lightkv.classes",
    "lightkv.layer_groups",
    "lightkv.token_ids",
    "lightkv.token_set",
    "lightkv.edits",
    "lightkv.holdings",
    "lightkv.ledger",
    "lightkv.memory_map",
    "lightkv.memory",
    "lightkv.attention",
    "lightkv.caller",
    "lightkv.kv_cache",
    "lightkv.integrations.weights",
    "lightkv.integrations.model.mixers",
    "lightkv.integrations.ranks",
    "lightkv.integrations.model",
    "lightkv.integrations.guess_tree",
    "lightkv.integrations.cached_model",
    "lightkv.integrations",
    "lightkv.contracts",
    "lightkv",
    "lightkv.router.config",
    "lightkv.router.peer_names",
    "lightkv.router.sampling_params",
    "lightkv.router.terminal",
    "lightkv.router.model_files",
    "lightkv.router.engine",
    "lightkv.router.text",
    "lightkv.router.model",
    "lightkv.router.service",
    "lightkv.router.api.metrics",
    "lightkv.router.api.grammars",
    "lightkv.router.api.answers",
    "lightkv.router.api.operators",
    "lightkv.router.api.http",
    "lightkv.router.api.requests",
    "lightkv.router.api",
    "lightkv.router.simulate",
    "lightkv.router.llm",
    "lightkv.router.cli",
    "lightkv.router",
)
# Only these may load torch, which would cost the other processes seconds and hundreds of megabytes.
WITH_TORCH = (
    "lightkv.triton_kernels",
    "lightkv.memory",
    "lightkv.attention",
    "lightkv.caller",
    "lightkv.kv_cache",
    "lightkv.integrations",
    "lightkv.contracts",
    "lightkv.router.model",
    "lightkv.router.llm",
)
# These stand in such a room and must not load torch.
WITHOUT_TORCH = (
    "lightkv.triton_kernels.layout.format_names",
    "lightkv.triton_kernels.layout.ring",
    "lightkv.triton_kernels.layout.slot_flags",
    "lightkv.triton_kernels.layout.strides",
    "lightkv.integrations.model.context",
)
MAX_FILES, MAX_LINES = 14, 500


def sources(*folders: str) -> list[Path]:
    """Every Python file of the folders; what the links in lightkv/ lead to counts where it really stands."""
    files = [file for folder in folders for file in sorted((ROOT / folder).rglob("*.py"))]
    return [file for file in files if file.resolve() == file]


class Found(NamedTuple):
    """What the tests ask of a file: the full names that it imports, each with whether it does so relatively,
    and where it uses torch's own pickling."""

    imports: tuple[tuple[str, bool], ...]
    pickling: tuple[str, ...]


@cache
def read(file: Path) -> Found:
    """Parses a file once for all tests. Its tree is not kept: half a million nodes slow every collection."""
    text = file.read_text(encoding="utf-8")
    tree = ast.parse(text, str(file))
    imports: list[tuple[str, bool]] = []
    for node in statements(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            imports.extend(_imported(file, node))
    pickling: list[str] = []
    for node in ast.walk(tree) if re.search(r"torch\s*\.\s*(load|save)\b", text) else ():
        if isinstance(node, ast.Attribute) and node.attr in ("load", "save"):
            name = ast.unparse(node)
            if name in ("torch.load", "torch.save"):
                pickling.append(f"{file.relative_to(ROOT)}:{node.lineno} uses {name}")
    return Found(tuple(imports), tuple(pickling))


def statements(tree: ast.Module) -> Iterator[ast.AST]:
    """Yields every statement of a file, without a look into expressions, which are most of the nodes."""
    found: list[ast.AST] = [tree]
    for node in found:  # which becomes longer meanwhile
        yield node
        for field in ("body", "orelse", "handlers", "finalbody", "cases"):
            found.extend(getattr(node, field, ()))


def parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), str(file))


def package_of(file: Path) -> str:
    """The package that a file's relative imports start from."""
    parts = file.relative_to(ROOT).parent.parts
    return ".".join(parts if parts[0] in ("lightkv", "bench", "tests") else ("lightkv", *parts))


def imported(file: Path) -> tuple[tuple[str, bool], ...]:
    """The full names of what a file imports, and whether it does so relatively."""
    return read(file).imports


def _imported(file: Path, node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, bool]]:
    if isinstance(node, ast.Import):
        yield from ((alias.name, False) for alias in node.names)
        return
    base = node.module or ""
    if node.level:
        package = package_of(file).split(".")
        base = ".".join([*package[: len(package) - node.level + 1], *([base] if base else [])])
    yield from ((f"{base}.{alias.name}", bool(node.level)) for alias in node.names)


def folder_of(name: str) -> str | None:
    """The folder that a module's full name belongs to, if one of ours."""
    first, *rest = name.split(".")
    if first == "lightkv":
        return rest[0] if rest and rest[0] in ("router", "triton_kernels") else "lightkv"
    return first if first in FOLDERS else None


def test_the_sources_are_found() -> None:
    for folder in FOLDERS:
        assert sources(folder), f"no Python file in {folder}/"


@pytest.mark.parametrize("folder", FOLDERS)
def test_imports_go_one_way(folder: str) -> None:
    wrong = [
        f"{file.relative_to(ROOT)} imports {name}"
        for file in sources(folder)
        for name, _ in imported(file)
        if (target := folder_of(name)) is not None and LAYERS[target] > LAYERS[folder]
    ]
    assert not wrong


def module_of(file: Path) -> str:
    """The full name under which a file is imported."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    return name if parts[0] in ("lightkv", "bench", "tests") else f"lightkv.{name}"


def is_within(name: str, package: str) -> bool:
    return f"{name}.".startswith(f"{package}.")


def room_of(name: str) -> str:
    return max((room for room in ROOMS if is_within(name, room)), key=len)


def modules_imported(file: Path, modules: set[str]) -> set[str]:
    """The modules of ours that a file imports. What stands under TYPE_CHECKING counts, too."""
    found = set()
    for name, _ in imported(file):
        while name and name not in modules:
            name = name.rpartition(".")[0]
        if name and name != module_of(file):
            found.add(name)
    return found


def test_rooms_import_one_way() -> None:
    files = {module_of(file): file for file in sources(*PRODUCT)}
    wrong = [
        f"{name} imports {target}"
        for name, file in files.items()
        for target in modules_imported(file, set(files))
        if target not in ("lightkv", "lightkv.router")  # packages, for their version and their lazy names
        and ROOMS.index(room_of(target)) > ROOMS.index(room_of(name))
    ]
    assert not wrong


def test_no_imports_in_a_circle() -> None:
    files = {module_of(file): file for file in sources(*PRODUCT)}
    graph = {name: modules_imported(file, set(files)) for name, file in files.items()}
    for name, targets in graph.items():  # a package's own files, for which it stands, are no circle
        graph[name] = {target for target in targets if not is_within(name, target)}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names them


def test_each_room_is_small() -> None:
    files = sources(*PRODUCT)
    for folder in {file.parent for file in files}:
        own = [file for file in files if file.parent == folder and file.name != "__init__.py"]
        assert len(own) <= MAX_FILES, folder
    assert len([file for file in files if file.parent == ROOT / "router"]) <= 5 + 1
    long = {
        str(file.relative_to(ROOT)): count
        for file in files
        if (count := len(file.read_text(encoding="utf-8").splitlines())) > MAX_LINES
    }
    assert not long


@pytest.mark.parametrize("folder", PRODUCT)
def test_imports_are_relative_within_a_folder_only(folder: str) -> None:
    """`from .step import` for a file beside this one, else the full name."""
    modules = {module_of(file) for file in sources(*PRODUCT)}
    wrong = []
    for file in sources(folder):
        package = package_of(file)
        for name, is_relative in imported(file):
            target = name if name in modules else name.rpartition(".")[0]
            is_beside = target.rpartition(".")[0] == package and target in modules
            if is_relative and not is_beside and name.rpartition(".")[0] != package:
                wrong.append(f"{file.relative_to(ROOT)} imports {name} relatively, out of its folder")
            if is_beside and not is_relative and target != package:
                wrong.append(f"{file.relative_to(ROOT)} imports {name} by its full name, from beside it")
            if name.split(".")[0] in ("router", "triton_kernels"):
                wrong.append(f"{file.relative_to(ROOT)} imports {name}: others' name, ours is lightkv.{name}")
    assert not wrong


def test_the_direction_is_recognised_when_it_is_wrong(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    file = tmp_path / "triton_kernels" / "bad.py"
    file.parent.mkdir()
    file.write_text("from ..ledger import TokenLedger\nfrom lightkv import router\nimport router.llm\n")
    names = [(name, is_relative, folder_of(name)) for name, is_relative in imported(file)]
    assert names == [
        ("lightkv.ledger.TokenLedger", True, "lightkv"),
        ("lightkv.router", False, "router"),
        ("router.llm", False, "router"),
    ]


def test_no_torch_outside_the_worker() -> None:
    names = sorted(module_of(file) for file in sources(*PRODUCT) if file.stem != "__main__")
    light = [name for name in names if not any(is_within(name, room) for room in WITH_TORCH)]
    program = f"""
import sys
from importlib import import_module
for name in {[*light, *WITHOUT_TORCH]!r}:
    import_module(name)
    heavy = {{"torch", "triton", "transformers"}} & set(sys.modules)
    assert not heavy, f"{{name}} imports {{heavy}}"
import lightkv
from lightkv.router import EngineConfig, SamplingParams, Scheduler
ledger = lightkv.TokenLedger(64, 4, 32)
assert "torch" not in sys.modules, "making a ledger imports torch"
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("folder", FOLDERS)
def test_nothing_is_pickled(folder: str) -> None:
    wrong = [
        f"{file.relative_to(ROOT)} imports {name}"
        for file in sources(folder)
        for name, _ in imported(file)
        if name.split(".")[0] in PICKLES
    ]
    wrong.extend(use for file in sources(folder) for use in read(file).pickling)
    assert not wrong


@pytest.mark.parametrize("folder", PRODUCT)
def test_no_environment_variable_is_read_at_import(folder: str) -> None:
    wrong = [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for file in sources(folder)
        if re.search("environ|getenv", file.read_text(encoding="utf-8"))  # others need not be parsed again
        for node in _run_at_import(parse(file))
        if isinstance(node, ast.Attribute | ast.Name)
        and re.fullmatch(r"(os\.)?(environ|environb|getenv)", ast.unparse(node))
    ]
    assert not wrong


def _run_at_import(node: ast.AST) -> Iterator[ast.AST]:
    """Every node but those in bodies of functions, which run later; decorators and defaults run at once."""
    yield node
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        children: list[ast.AST] = [*node.decorator_list, node.args]
    elif isinstance(node, ast.Lambda):
        children = [node.args]
    else:
        children = list(ast.iter_child_nodes(node))
    for child in children:
        yield from _run_at_import(child)


def test_the_core_knows_no_pages() -> None:
    others = {"integrations", "contracts"}
    files = [file for file in sources("lightkv") if not others & set(file.parts)]
    assert not [str(file) for file in files if "page_size" in file.read_text(encoding="utf-8")]


def test_what_tests_share_stands_in_support() -> None:
    """Files beside tests are tests and conftest.py, and no test imports one. The scripts of clients are run by
    other Pythons, which find none of our packages."""
    files = [file for file in sources("tests") if not {"support", "scripts"} & set(file.parts)]
    names = {module_of(file).removeprefix("tests.") for file in files} | {file.stem for file in files}
    names.remove("__init__")
    wrong = []
    for file in files:
        if not file.stem.startswith("test_") and file.stem not in ("conftest", "__init__"):
            wrong.append(f"{file.relative_to(ROOT)} is no test: it belongs into tests/support")
        for name, _ in imported(file):
            module = name.removeprefix("tests.")
            parts = module.split(".")
            if names & {".".join(parts[:count]) for count in range(1, len(parts) + 1)}:
                wrong.append(f"{file.relative_to(ROOT)} imports {name}, which is no part of tests.support")
    assert not wrong
