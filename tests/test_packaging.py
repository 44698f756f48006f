"""What installing lightkv gives: one name, real files, and the same imports however it is installed."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import numpy
import pytest

import lightkv
import lightkv.router

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FOLDERS = ("lightkv", "router", "triton_kernels")
FILES = (
    "setup.py",
    "pyproject.toml",
    "MANIFEST.in",
    "README.md",
    "CHANGELOG.md",
    "LICENSE",
    "constraints.txt",
)

# Says where lightkv was found, having imported what an installation has to hold.
IMPORTS = """
import importlib.util, pathlib
import lightkv, lightkv.ledger, lightkv.router, lightkv.router.service.child_process, lightkv.triton_kernels
assert importlib.util.find_spec("lightkv.triton_kernels.write.write_kv") is not None
assert (pathlib.Path(lightkv.__file__).parent / "integrations" / "hf_cache.py").is_file()
print(pathlib.Path(lightkv.__file__).parent)
"""
ONE_NAME = """
for name in ("router", "triton_kernels"):
    assert importlib.util.find_spec(name) is None, f"a top-level {name} is importable"
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is built, with its links; building leaves files behind."""
    target = tmp_path_factory.mktemp("checkout")
    for folder in FOLDERS:
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / folder, target / folder, symlinks=True, ignore=ignored)
    for file in FILES:
        shutil.copy(ROOT / file, target)
    (target / "tests").mkdir()
    (target / "tests" / "test_of_the_checkout.py").touch()
    return target


@pytest.fixture(scope="module")
def built(checkout: Path) -> tuple[Path, Path]:
    """The sdist, and the wheel that was built from it."""
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", "dist", ".", cwd=checkout)
    (sdist,), (wheel,) = checkout.glob("dist/*.tar.gz"), checkout.glob("dist/*.whl")
    return sdist, wheel


DATA = {
    "lightkv/py.typed",
    "lightkv/router/simulate/report/page.html.jinja",
    "lightkv/router/engine/step_time.json",
}


def run(*command: str, cwd: Path, **environment: str) -> str:
    """The command's standard output; fails the test with what it said."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | environment
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def modules(root: Path) -> set[str]:
    """The Python files of the three folders, by where an installation has them."""
    found = set()
    for folder in FOLDERS:
        for file in (root / folder).rglob("*.py"):
            if file.resolve() == file:
                name = str(file.relative_to(root))
                found.add(name if folder == "lightkv" else f"lightkv/{name}")
    return found


def test_the_links_are_links() -> None:
    assert (ROOT / "lightkv" / "router").readlink() == Path("../router")
    assert (ROOT / "lightkv" / "triton_kernels").readlink() == Path("../triton_kernels")


def test_the_wheel_holds_every_module_and_nothing_outside_lightkv(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[1]) as wheel:
        names = {name for name in wheel.namelist() if not re.match(r"lightkv-[\d.]+\.dist-info/", name)}
        assert names == modules(ROOT) | DATA
        assert all((entry.external_attr >> 28) != 0xA for entry in wheel.infolist()), "a link in the wheel"
        for name in ("lightkv/router/engine/scheduler.py", "lightkv/triton_kernels/write/write_kv.py"):
            assert wheel.read(name) == (ROOT / name).read_bytes()


def test_the_sdist_holds_real_files(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[0]) as sdist:
        members = {member.name.partition("/")[2]: member for member in sdist.getmembers()}
    files = {name for name, member in members.items() if not member.isdir() and ".egg-info/" not in name}
    assert files == modules(ROOT) | DATA | {*FILES, "PKG-INFO", "setup.cfg"}
    assert not [name for name, member in members.items() if member.issym() or member.islnk()]


def test_the_changelog_begins_with_the_version_that_is_built(built: tuple[Path, Path]) -> None:
    version = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)[0]
    names = [path.name for path in built]
    assert names == [f"lightkv-{version}.tar.gz", f"lightkv-{version}-py3-none-any.whl"]
    assert f"lightkv-{version}-py3-none-any.whl" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


@pytest.mark.slow  # what the wheel holds is compared above
def test_an_ordinary_installation(built: tuple[Path, Path], tmp_path: Path) -> None:
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index")
    run(*pip, "--target", str(site), str(built[1]), cwd=elsewhere)
    assert {path.name for path in site.iterdir() if "dist-info" not in path.name} <= {"lightkv", "bin"}
    found = run(sys.executable, "-c", IMPORTS + ONE_NAME, cwd=elsewhere, PYTHONPATH=str(site))
    assert found == str(site / "lightkv")


@pytest.fixture(scope="module")
def types(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> "TypeChecker":
    """mypy --strict over programs of a user who has installed the wheel, beside the packages that it needs."""
    folder = tmp_path_factory.mktemp("user")
    run(sys.executable, "-m", "venv", "--without-pip", "env", cwd=folder)
    python = folder / "env" / "bin" / "python"
    site = Path(
        run(str(python), "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])", cwd=folder)
    )
    with zipfile.ZipFile(built[1]) as wheel:
        wheel.extractall(site)
    (site / "others.pth").write_text(sysconfig.get_paths()["purelib"])
    return TypeChecker(folder, python)


class TypeChecker:
    """Checks programs with mypy --strict, which finds lightkv where `python` does."""

    def __init__(self, folder: Path, python: Path) -> None:
        self._folder, self._python = folder, python

    def check(self, programs: dict[str, str]) -> list[str]:
        """Returns mypy's lines about the programs, which are named by their files."""
        for name, program in programs.items():
            (self._folder / name).write_text(program, encoding="utf-8")
        mypy = (sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--hide-error-context")
        command = (*mypy, f"--python-executable={self._python}", *programs)
        env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")}
        done = subprocess.run(command, cwd=self._folder, env=env, capture_output=True, text=True, timeout=280)
        assert not done.stderr, done.stderr
        return done.stdout.splitlines()


@pytest.mark.slow
def test_every_public_name_has_its_type(types: TypeChecker) -> None:
    names = [(package, name) for package in (lightkv, lightkv.router) for name in package.__all__]
    program = "\n".join(
        [
            "import lightkv, lightkv.router",
            *(f"reveal_type({package.__name__}.{name})" for package, name in names),
            "lightkv.KVCach",
            'lightkv.router.LLM("m", max_model_len=64)',
            'lightkv.KVSpec(1, 1, 8, 8, lightkv.Ring, "int8")',
        ]
    )
    *found, unknown, keyword, wrong = types.check({"names.py": program})
    assert 'has no attribute "KVCach"' in unknown
    assert 'Argument "max_model_len" to "LLM" has incompatible type "int"; expected "Never"' in keyword
    assert 'Argument 5 to "KVSpec" has incompatible type' in wrong
    assert len(found) == len(names) > 35
    for (package, name), line in zip(names, found, strict=True):
        item = getattr(package, name)
        revealed = line.partition("Revealed type is ")[2]
        assert revealed.startswith(('"def (', '"Overload(')), line
        if isinstance(item, type):  # what it makes is an object of this class, not Any
            assert f"{item.__module__}.{item.__qualname__}" in revealed.rpartition("->")[2], line


@pytest.mark.slow
def test_the_programs_of_the_docs_are_typed(types: TypeChecker) -> None:
    programs = {}
    for page in ("README.md", "docs/using.md", "docs/kernels.md"):
        for place, block in enumerate(python_blocks(page)):
            programs[f"{Path(page).stem.lower()}_{place}.py"] = block
    memory = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")
    for place, part in enumerate(re.split("^## ", memory, flags=re.MULTILINE)):
        programs[f"memory_{place}.py"] = "\n".join(  # the programs of a part go on from one another
            block for block in BLOCK.findall(part) if "T5Config" not in block
        )
    # Its page says that the reader brings these; transformers' own types know no `generate`.
    brought = "from typing import Any\nmodel: Any\ninputs: dict[str, Any]\n"
    programs["using_1.py"] = brought + programs["using_1.py"]
    assert len(programs) >= 10
    assert types.check(programs) == []


def python_blocks(page: str) -> list[str]:
    return BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))


def test_a_checkout_that_is_not_installed(checkout: Path) -> None:
    assert run(sys.executable, "-c", IMPORTS, cwd=checkout) == str(checkout / "lightkv")


def test_an_editable_installation(checkout: Path, tmp_path: Path) -> None:
    build = "import sys, setuptools.build_meta as backend; backend.build_editable(sys.argv[1])"
    run(sys.executable, "-c", build, str(tmp_path), cwd=checkout)
    (wheel,) = tmp_path.glob("*.whl")
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    # -S leaves out this environment's own installation. Of other packages numpy is needed alone.
    packages = str(Path(numpy.__file__).parents[1])
    program = f"import site, sys; site.addsitedir({str(site)!r}); sys.path.append({packages!r})\n"
    program += IMPORTS + ONE_NAME
    assert run(sys.executable, "-S", "-c", program, cwd=elsewhere) == str(checkout / "lightkv")


def test_without_the_extra(checkout: Path) -> None:
    """As `pip install .` leaves it: torch, triton and numpy, and none of the packages of the extra."""
    program = """
import sys

# None is what Python takes for a module that is not there.
sys.modules.update(dict.fromkeys(("typer", "rich", "msgspec", "transformers", "tokenizers", "jinja2")))
for statement in (
    "from lightkv.router import LLM",
    "from lightkv.integrations.hf_cache import LightKVCache",
    "from lightkv.integrations.cached_model import CachedModel",
):
    try:
        exec(statement)
    except ImportError as error:
        print(error)
import lightkv
lightkv.KVCache, lightkv.TokenLedger
from lightkv.router.cli.__main__ import main
main()
"""
    done = subprocess.run(
        (sys.executable, "-c", program), cwd=checkout, capture_output=True, text=True, timeout=120
    )
    remedy = 'is not installed; run pip install ".[router]" in a checkout of lightkv'
    lines = done.stdout.splitlines()
    assert [line.endswith(remedy) for line in lines] == [True] * 3, done.stdout + done.stderr
    assert done.returncode == 1
    assert done.stderr.startswith("lightkv: the package ")
    assert done.stderr.endswith(f"{remedy}\n")
    assert len(done.stderr.splitlines()) == 1
