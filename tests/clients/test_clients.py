"""Clients that people build on, against a whole service: structured output, tools and responses.

Each client runs a script in an environment of its own, which `make test-all` installs from `requirements/`: the
clients need other versions of openai, httpx and more than lightkv's tests do.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from lightkv.router.config import EngineConfig
from lightkv.router.model_files import resolve
from tests.support.byte_model import save_model_of_family
from tests.support.chat_templates import TEMPLATES
from tests.support.served import API_KEY, Served, save_tiny_model

HERE = Path(__file__).parent
ENVIRONMENTS = Path(sys.prefix) / "clients"  # as in the Makefile
SECONDS = 240.0  # for one script, on a machine that is busy otherwise too

# Each script with the environment that it runs in.
CLIENTS = [
    ("openai", "use_openai.py"),
    ("instructor", "use_openai.py"),  # it brings another version of openai
    ("litellm", "use_openai.py"),  # and so does this one
    ("openai", "use_langchain.py"),
    ("openai", "use_openai_agents.py"),
    ("openai", "use_pydantic_ai.py"),
    ("instructor", "use_instructor.py"),
    ("litellm", "use_litellm.py"),
    ("smolagents", "use_smolagents.py"),
    ("dspy", "use_dspy.py"),
    ("anthropic", "use_anthropic.py"),
    ("anthropic", "use_anthropic.cjs"),
]
# Those that also ask for any JSON object and for free texts, which a model of random weights never ends.
NO_TEXTS = (
    "use_openai_agents.py",
    "use_smolagents.py",
    "use_dspy.py",
    "use_anthropic.py",
    "use_anthropic.cjs",
)
OF_TEXTS = [pair for pair in CLIENTS if pair[1] not in NO_TEXTS]
# Those with a loop of calls, of which each turn hits what it repeats of the ones before, to the token. A random
# model may write a text in other tokens than the tokenizer does, but for one whose tokens are bytes.
LOOPS = ("use_openai.py", "use_litellm.py", "use_smolagents.py", "use_anthropic.py")
OF_LOOPS = [pair for pair in CLIENTS if pair[1] in LOOPS]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Served]]:
    """Returns the service of a model (tiny, bytes or default), which is started when it is first asked for."""
    directory = tmp_path_factory.mktemp("clients")
    started: dict[str, Served] = {}
    with ExitStack() as stack:

        def service(name: str) -> Served:
            if name not in started:
                if name == "bytes":
                    model = save_model_of_family(directory / name, TEMPLATES["qwen2.5"])
                elif name == "tiny":
                    model = save_tiny_model(directory / name)
                else:
                    model = resolve(EngineConfig.model, print)
                options = ["--served-model-name", name, "--report-cached-tokens"]
                if name != "bytes":  # whose own template takes tools
                    options += ["--chat-template", str(HERE.parents[1] / "deploy" / "chat_with_tools.jinja")]
                started[name] = Served(model, directory / f"{name}.log", *options, api_key=API_KEY)
                stack.callback(started[name].close)
                started[name].wait_ready()
            return started[name]

        yield service
        for served in started.values():
            served.at_rest()
            served.process.terminate()
            assert served.wait() == 0, served.log.read_text()


def run(environment: str, script: str, served: Served, model: str) -> str:
    """Returns what a script prints. Fails with it if one of the script's checks failed."""
    folder = ENVIRONMENTS / environment
    program = folder / "bin" / ("python" if script.endswith(".py") else "node")
    assert program.exists(), f"{program} is not there: run `make clients`, which installs it"
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    variables["NODE_PATH"] = str(folder / "node_modules")
    done = subprocess.run(
        [program, HERE / "scripts" / script, "--url", f"{served.url}/v1", "--key", API_KEY, "--model", model],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=variables,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.parametrize(("environment", "script"), CLIENTS)
def test_a_client(environment: str, script: str, start: Callable[[str], Served]) -> None:
    print(run(environment, script, start("tiny"), "tiny"))


@pytest.mark.parametrize(("environment", "script"), OF_LOOPS)
def test_a_client_of_the_model_of_bytes(
    environment: str, script: str, start: Callable[[str], Served]
) -> None:
    print(run(environment, script, start("bytes"), "bytes"))


@pytest.mark.parametrize(("environment", "script"), OF_TEXTS)
def test_a_client_of_the_default_model(environment: str, script: str, start: Callable[[str], Served]) -> None:
    print(run(environment, script, start("default"), "default"))


def test_every_script_and_every_environment_is_used() -> None:
    environments, scripts = map(set, zip(*CLIENTS, strict=True))
    others = {"ray"}  # of test_ray_serve.py
    assert environments | others == {file.stem for file in (HERE / "requirements").iterdir()}
    assert scripts == {file.name for file in (HERE / "scripts").glob("use_*")}
