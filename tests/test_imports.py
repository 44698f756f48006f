"""Who imports whom, and what no file may contain. Reads the sources; runs almost nothing."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("triton_kernels", "lightkv", "router", "bench", "tests")
PRODUCT = ("triton_kernels", "lightkv", "router")
LAYERS = {"triton_kernels": 0, "lightkv": 1, "router": 2, "bench": 3, "tests": 3}
PICKLES = {"pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}

# What runs in the API and router processes, where torch would cost seconds and hundreds of megabytes.
WITHOUT_TORCH = (
    "lightkv",
    "lightkv.counts",
    "lightkv.errors",
    "lightkv.edits",
    "lightkv.integrations.model.context",
    "lightkv.ledger",
    "lightkv.ledger.state",
    "lightkv.ledger.prefix_tree",
    "lightkv.router",
    "lightkv.router.engine.admission",
    "lightkv.router.simulate.paged_ledger",
    "lightkv.router.api.app",
    "lightkv.router.api.openai.document",
    "lightkv.router.api.server",
    "lightkv.router.service.api_settings",
    "lightkv.router.service.child_process",
    "lightkv.router.cli",
    "lightkv.router.cli.__main__",
    "lightkv.router.text.completion",
    "lightkv.router.config",
    "lightkv.router.cli.demo",
    "lightkv.router.engine.loop",
    "lightkv.router.engine.forecast",
    "lightkv.router.service.frames",
    "lightkv.router.api.generation",
    "lightkv.router.api.http_guard",
    "lightkv.router.service.launch",
    "lightkv.router.engine.step",
    "lightkv.router.api.metrics",
    "lightkv.router.model_files",
    "lightkv.router.api.openai.protocol",
    "lightkv.router.api.openai.writer",
    "lightkv.router.api.prompt_reader",
    "lightkv.router.api.request_body",
    "lightkv.router.service.router",
    "lightkv.router.service.router_client",
    "lightkv.router.service.router_process",
    "lightkv.router.sampling_params",
    "lightkv.router.cli.service",
    "lightkv.router.cli.http_client",
    "lightkv.router.service.messages",
    "lightkv.router.engine.scheduler",
    "lightkv.router.cli.simulate",
    "lightkv.router.simulate.config",
    "lightkv.router.simulate.record",
    "lightkv.router.simulate.report.page",
    "lightkv.router.simulate.result",
    "lightkv.router.simulate.simulator",
    "lightkv.router.engine.step_time",
    "lightkv.router.terminal",
    "lightkv.router.text.tokenizer",
    "lightkv.router.simulate.traces",
    "lightkv.router.api.unsupported_fields",
    "lightkv.router.engine.waiting",
    "lightkv.router.model.loader",
    "lightkv.router.service.worker",
    "lightkv.router.service.worker_client",
)


def sources(*folders: str) -> list[Path]:
    """Every Python file of the folders; what the links in lightkv/ lead to counts where it really stands."""
    files = [file for folder in folders for file in sorted((ROOT / folder).rglob("*.py"))]
    return [file for file in files if file.resolve() == file]


def parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), str(file))


def package_of(file: Path) -> str:
    """The package that a file's relative imports start from."""
    parts = file.relative_to(ROOT).parent.parts
    return ".".join(parts if parts[0] in ("lightkv", "bench", "tests") else ("lightkv", *parts))


def imported(file: Path) -> Iterator[tuple[str, bool]]:
    """The full names of what a file imports, and whether it does so relatively."""
    for node in ast.walk(parse(file)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, False) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
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


@pytest.mark.parametrize("folder", FOLDERS)
def test_imports_are_relative_within_a_folder_only(folder: str) -> None:
    wrong = []
    for file in sources(folder):
        for name, is_relative in imported(file):
            if is_relative and folder_of(name) != folder:
                wrong.append(f"{file.relative_to(ROOT)} imports {name} relatively, out of its folder")
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
    program = f"""
import sys
from importlib import import_module
for name in {WITHOUT_TORCH!r}:
    import_module(name)
    heavy = {{"torch", "triton", "transformers"}} & set(sys.modules)
    assert not heavy, f"{{name}} imports {{heavy}}"
import lightkv
from lightkv.router import EngineConfig, SamplingParams, Scheduler, peak_tokens
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
    for file in sources(folder):
        for node in ast.walk(parse(file)):
            if isinstance(node, ast.Attribute) and ast.unparse(node) in ("torch.load", "torch.save"):
                wrong.append(f"{file.relative_to(ROOT)}:{node.lineno} uses {ast.unparse(node)}")
    assert not wrong


@pytest.mark.parametrize("folder", PRODUCT)
def test_no_environment_variable_is_read_at_import(folder: str) -> None:
    wrong = [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for file in sources(folder)
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
    files = [file for file in sources("lightkv") if "integrations" not in file.parts]
    assert not [str(file) for file in files if "page_size" in file.read_text(encoding="utf-8")]
