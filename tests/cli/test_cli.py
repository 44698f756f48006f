"""The commands `lightkv generate` and `info`: options, answers, and errors for wrong input."""

import json
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import fields
from functools import partial
from pathlib import Path

import huggingface_hub
import pytest
import torch
import typer
from rich.markup import escape
from transformers import AutoModelForCausalLM, LlamaConfig
from typer.testing import CliRunner

from bench.common.random_model import random_model
from lightkv.router import LLM, EngineConfig, SamplingParams
from lightkv.router.cli.app import app
from lightkv.router.config import bounds, declared
from lightkv.router.model.build import build_runner
from lightkv.router.model.info import model_info
from tests.support.served import save_tiny_model

SMALL = ["--device", "cpu", "--max-total-tokens", "2048"]
GREEDY = ["--temperature", "0", "--max-tokens", "6"]
PARAMS = SamplingParams(temperature=0, max_tokens=6)
QUESTION = "What is the capital of France?"


def run(*args: str, stdin: str | bytes | None = None) -> tuple[int, str, str]:
    """Returns the command's exit code, standard output and standard error."""
    result = CliRunner().invoke(app, list(args), input=stdin, prog_name="lightkv")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def generate(*args: str, stdin: str | bytes | None = None) -> tuple[int, str, str]:
    return run("generate", *SMALL, *GREEDY, *args, stdin=stdin)


def flat(text: str) -> str:
    """Returns text without the frames and line ends of a terminal's layout."""
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", text).split())


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with the default model's tokenizer and chat template."""
    return save_tiny_model(tmp_path_factory.mktemp("cli") / "tiny")


@pytest.fixture(scope="module")
def llm(tiny: Path) -> LLM:
    return LLM(EngineConfig(str(tiny), device="cpu", max_total_tokens=2048))


@pytest.fixture
def loaded(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """The tiny model, which commands of the test find loaded instead of loading any."""
    monkeypatch.setattr("lightkv.router.llm.LLM", lambda config, report: llm)
    return llm


@pytest.fixture
def templateless(tmp_path: Path, tiny: Path) -> Path:
    """The tiny model without its chat template."""
    target = tmp_path / "model"
    shutil.copytree(tiny, target, ignore=shutil.ignore_patterns("chat_template.jinja"))
    settings = target / "tokenizer_config.json"
    values = json.loads(settings.read_text()) if settings.exists() else {}
    settings.write_text(json.dumps({key: value for key, value in values.items() if key != "chat_template"}))
    return target


# --------------------------------------------------------------------------------
# Help and options


def test_help_version_and_bad_options_load_neither_torch_nor_the_server() -> None:
    program = """
import sys
from lightkv.router.cli.app import app
for args in (["--help"], ["generate", "--help"], ["info", "--help"], ["--version"], [],
             ["serve", "--help"], ["chat", "--help"], ["top", "--help"], ["map", "--help"],
             ["generate", "--temperature", "nan", "hi"], ["generate", "--max-tokens", "x", "hi"]):
    try:
        app(args)
    except SystemExit:
        pass
heavy = {"torch", "transformers", "fastapi", "uvicorn", "rpyc"} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, timeout=60)


def test_version() -> None:
    assert run("--version") == (0, "lightkv 0.1.0\n", "")


def test_no_arguments_show_the_commands() -> None:
    _, out, err = run()
    assert "generate" in out + err
    assert "info" in out + err


@pytest.mark.parametrize("command", ["generate", "info"])
def test_every_engine_setting_is_an_option_with_its_default(command: str) -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    options = {option.name: option for option in commands[command].params}
    for field in fields(EngineConfig):
        option = options[field.name]
        assert "--" + field.name.replace("_", "-") in option.opts
        assert option.default == field.default
        limits = declared(EngineConfig)[field.name].meta
        assert option.help == escape(field.metadata["help"] + (f" [{bounds(limits)}]" if limits else ""))
    assert str(options["mem_fraction"].help).endswith(r" \[above 0 and up to 1]")


@pytest.mark.parametrize("command", ["generate", "info"])
def test_help_has_examples(command: str) -> None:
    code, out, _ = run(command, "--help")
    assert code == 0
    assert f"lightkv {command} " in out.split("Examples")[1]


# --------------------------------------------------------------------------------
# Wrong input


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--temperature", "nan", "hi"], "temperature is nan"),
        (["--temperature", "-1", "hi"], "temperature is -1"),
        (["--top-p", "2", "hi"], "top_p is 2"),
        (["--max-tokens", "0", "hi"], "max_tokens is 0"),
        (["--n", "0", "hi"], "n is 0"),
        (["--stop", "", "hi"], "stop is ['']"),
        (["--dtype", "int3", "hi"], "--dtype is 'int3'"),
        (["--device", "tpu", "hi"], "--device is 'tpu'"),
        (["--attention-backend", "magic", "hi"], "give one of torch, triton"),
        (["--mem-fraction", "nan", "hi"], "--mem-fraction is nan"),
        (["--max-total-tokens", "0", "hi"], "--max-total-tokens is 0"),
        (["--max-model-len", "9999999", "hi"], "--max-model-len is 9999999"),
        (["--model", "./nowhere", "hi"], "model './nowhere' was not found"),
        (["--device", "cpu", "--max-total-tokens", "16", "hi"], "do not fit the pool of 16 tokens"),
        (["--device", "cpu", "--max-model-len", "64", "hi"], "do not fit the context of 64 tokens"),
        (["--max-tokens", "8192", "hi"], "do not fit the context of 8192 tokens"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_bad_input_is_one_line_and_exit_code_2(args: list[str], words: str) -> None:
    code, out, err = run("generate", *args)
    assert code == 2
    assert out == ""
    last = err.splitlines()[-1]
    assert last.startswith("lightkv: ")
    assert words in last
    assert "Traceback" not in err


def test_what_cannot_fit_is_refused_before_a_model_is_loaded() -> None:
    code, _, err = run("generate", "--max-tokens", "9000", "hi")
    assert code == 2
    assert "importing torch" not in err


@pytest.mark.parametrize(
    ("args", "stdin", "words"),
    [
        ([""], None, "prompt 1 is empty"),
        (["a", ""], None, "prompt 2 is empty"),
        ([], "", "standard input is empty"),
        (["-"], "\n", "standard input is empty"),
        (["-", "-"], "x", 'give "-" once'),
        (["-"], b"\xff\xfe", "not UTF-8 text"),
        (["--raw", "--system", "s", "hi"], None, "leave one of them out"),
        (["--max-tokens", "many", "hi"], None, "--max-tokens"),
        (["--no-such-option", "hi"], None, "--no-such-option"),
    ],
    ids=[
        "empty",
        "second-empty",
        "empty-pipe",
        "empty-dash",
        "two-dashes",
        "bytes",
        "raw-system",
        "word",
        "name",
    ],
)
def test_bad_usage_is_exit_code_2(args: list[str], stdin: str | bytes | None, words: str) -> None:
    code, out, err = run("generate", *args, stdin=stdin)
    assert code == 2
    assert out == ""
    assert words in flat(err)


def test_a_pool_beyond_the_memory_is_exit_code_1(tiny: Path) -> None:
    settings = ["--model", str(tiny), "--device", "cpu", "--max-total-tokens", "100000000000"]
    code, out, err = run("generate", *settings, "hi")
    assert code == 1
    assert out == ""
    assert err.splitlines()[-1].startswith("lightkv: ")


def test_chat_without_a_template_is_refused(templateless: Path) -> None:
    code, out, err = generate("--model", str(templateless), "--chat", QUESTION)
    assert code == 2
    assert out == ""
    assert err.splitlines()[-1].startswith("lightkv: this model has no chat template")


# --------------------------------------------------------------------------------
# Answers


def test_standard_output_is_the_answer_alone(llm: LLM, tiny: Path) -> None:
    expected = llm.generate([{"role": "user", "content": QUESTION}], PARAMS)[0]
    code, out, err = generate("--model", str(tiny), QUESTION)
    assert code == 0
    assert out == expected.outputs[0].text + "\n"
    last = err.splitlines()[-1]
    assert last.startswith(f"{len(expected.prompt_token_ids)} prompt tokens (0 cached), 6 new in ")
    assert last.endswith("1 of 1 cut off at --max-tokens 6")
    assert "K/V pool: 2,048 tokens" in err


@pytest.mark.slow
def test_raw_continues_the_text_from_a_pipe() -> None:
    """With the default model, as most people try it first."""
    llm = LLM(EngineConfig(device="cpu", max_total_tokens=2048))
    expected = llm.generate("The capital of France is", PARAMS)[0].outputs[0].text
    for args in ([], ["-"]):
        code, out, _ = generate("--raw", *args, stdin="The capital of France is\n")
        assert (code, out) == (0, expected + "\n")


def test_a_system_prompt_comes_before_the_prompt(llm: LLM, tiny: Path) -> None:
    chat = [{"role": "system", "content": "You are a pirate."}, {"role": "user", "content": QUESTION}]
    expected = llm.generate(chat, PARAMS)[0]
    _, out, err = generate("--model", str(tiny), "--system", "You are a pirate.", QUESTION)
    assert out == expected.outputs[0].text + "\n"
    assert err.splitlines()[-1].startswith(f"{len(expected.prompt_token_ids)} prompt tokens")


def test_several_prompts_are_answered_in_order_under_headings(loaded: LLM) -> None:
    prompts = ["The capital of France is", "Two plus two is", "The sun is"]
    texts = [output.outputs[0].text for output in loaded.generate(prompts, PARAMS)]
    _, out, _ = generate("--raw", *prompts)
    assert out == "\n".join(f"## {p}\n\n{t}\n" for p, t in zip(prompts, texts, strict=True))


def test_n_answers_and_a_stop_string(loaded: LLM) -> None:
    text = loaded.generate("The capital of France is", PARAMS)[0].outputs[0].text
    begun, stop = text[:3], text[3:5]
    assert stop not in begun + stop[:1]
    code, out, err = generate("--raw", "--n", "2", "--stop", stop, "The capital of France is")
    assert code == 0
    heading = "## The capital of France is"
    assert out == f"{heading} (1 of 2)\n\n{begun}\n\n{heading} (2 of 2)\n\n{begun}\n"
    assert "cut off" not in err


@pytest.mark.slow
def test_a_seed_repeats_the_answer() -> None:
    args = ("--raw", "--temperature", "1", "--seed", "5", "Once upon a time")
    assert generate(*args)[1] == generate(*args)[1]


def test_without_a_template_the_text_is_continued_with_a_note(templateless: Path, llm: LLM) -> None:
    code, out, err = generate("--model", str(templateless), "The capital of France is")
    assert code == 0
    assert out == llm.generate("The capital of France is", PARAMS)[0].outputs[0].text + "\n"
    assert "no chat template" in err


# --------------------------------------------------------------------------------
# Interruptions


def _long_answer(model: Path | None = None) -> tuple[subprocess.Popen[bytes], bytes]:
    """Starts a command with a long answer of the default or a given model. Returns its process and the first
    byte of the answer."""
    args = ["generate", *SMALL, "--temperature", "0", "--max-tokens", "1500", "--raw", "1 2 3 4 5 6 7 8"]
    chosen = [] if model is None else ["--model", str(model)]
    program = [sys.executable, "-m", "lightkv.router.cli", *args, *chosen]
    process = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0)
    assert process.stdout is not None
    return process, process.stdout.read(1)


def test_ctrl_c_ends_the_command_cleanly(tiny: Path) -> None:
    process, first = _long_answer(tiny)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=90)
    assert process.returncode == 130
    assert (first + out).endswith(b"\n")
    assert err.endswith(b"interrupted\n")
    assert b"Traceback" not in err


@pytest.mark.slow
def test_a_reader_that_closes_the_pipe_causes_no_error_message() -> None:
    process, _ = _long_answer()
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    err = process.stderr.read()
    process.wait(timeout=90)
    process.stderr.close()
    assert process.returncode == 1
    assert b"Error" not in err
    assert b"Traceback" not in err


# --------------------------------------------------------------------------------
# info


def test_info_agrees_with_the_engine(llm: LLM, tiny: Path) -> None:
    given = [*SMALL, "--max-num-seqs", "3", "--max-model-len", "99", "--prefill-chunk", "7"]
    code, out, _ = run("info", "--model", str(tiny), *given, "--json")
    assert code == 0
    told = json.loads(out)
    model, engine = told["model"], llm.info
    assert told["machine"]["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert told["machine"]["device"] == "cpu"
    assert model["bytes_per_token"] == engine.bytes_per_token == 2 * 2 * (8 + 8) * 4
    assert (model["num_layers"], model["num_kv_heads"], model["k_dim"], model["v_dim"]) == (2, 2, 8, 8)
    assert (model["pool_slots"], model["pool_bytes"]) == (2048, engine.pool_bytes)
    assert (model["pool_reason"], model["architecture"]) == (engine.pool_reason, engine.architecture)
    assert (model["max_num_seqs"], model["max_model_len"], model["prefill_chunk"]) == (3, 99, 7)
    num_parameters = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(tiny).parameters())
    assert (model["dtype"], model["num_parameters"]) == ("float32", num_parameters)


def test_the_text_of_info_has_the_numbers_and_the_reason() -> None:
    code, out, _ = run("info", "--device", "cpu", "--dtype", "float16")
    assert code == 0
    assert "23,040 bytes: 30 layers x 3 K/V heads x (64 + 64) in float16" in out
    assert "32,768 tokens in 0.70 GiB" in out
    assert "the default of a CPU" in out


def test_info_refuses_an_unknown_model_like_the_engine() -> None:
    code, out, err = run("info", "--model", "./nowhere")
    assert (code, out) == (2, "")
    assert "was not found" in err.splitlines()[-1]


def test_info_needs_no_memory_for_the_weights(tmp_path: Path) -> None:
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=8, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=1024, architectures=["LlamaForCausalLM"], dtype="bfloat16",
    )  # fmt: skip
    _write_hollow(config, tmp_path)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _kilobytes("VmRSS")
    info = model_info(EngineConfig(device="cpu", dtype="bfloat16"), tmp_path)
    assert info["weight_bytes"] > 3.4e9, info
    assert info["bytes_per_token"] == 2 * 8 * 8 * 128 * 2, info
    assert (_kilobytes("VmHWM") - before) * 1024 < 0.6e9


def _kilobytes(name: str) -> int:
    """Returns a figure of this process's memory."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1])


@pytest.fixture
def own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device of 24 GiB on which only this process holds memory: what others hold changes meanwhile."""
    total = 24 * 2**30

    def mem_get_info(device: torch.device | None = None) -> tuple[int, int]:
        return total - torch.cuda.memory_reserved(device), total

    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)


@pytest.mark.gpu
def test_info_predicts_the_pool_beside_the_weights(own_memory: None, tmp_path: Path) -> None:
    config = LlamaConfig(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=8, num_attention_heads=16,
        num_key_value_heads=8, vocab_size=32000, max_position_embeddings=2048, tie_word_embeddings=False,
    )  # fmt: skip
    random_model(config, torch.device("cpu"), torch.bfloat16).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")  # has to exist; nothing in this test reads it
    settings = EngineConfig(str(tmp_path), device="cuda", mem_fraction=0.4, max_num_seqs=4, cuda_graphs=False)
    torch.cuda.empty_cache()  # both figures are of what is held now, without what earlier tests left
    told = model_info(settings, tmp_path)
    runner, engine = build_runner(settings, lambda line: None)
    assert (told["dtype"], told["bytes_per_token"]) == (engine.dtype, engine.bytes_per_token)
    # The weights have 1.3 GB, which the predicted figure has to leave out. Loading holds a little more.
    missed = abs(told["pool_slots"] - engine.capacity) * told["bytes_per_token"]
    assert missed < told["weight_bytes"] / 5, (told, engine)
    del runner


def _write_hollow(config: LlamaConfig, directory: Path) -> None:
    """Writes a checkpoint of `config` whose weights are a sparse file, which takes no room on the disk."""
    config.save_pretrained(directory)
    (directory / "tokenizer.json").write_text("{}")  # has to exist; nothing in this test reads it
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    header, end = {}, 0
    for name, tensor in model.state_dict().items():
        start, end = end, end + tensor.numel() * 2
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        file.truncate(8 + len(encoded) + end)


def test_the_models_of_the_caches_are_listed(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = tmp_path / "hub"
    hub.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(huggingface_hub, "scan_cache_dir", partial(huggingface_hub.scan_cache_dir, hub))
    assert run("list")[:2] == (0, "no model is in lightkv's or in the Hugging Face cache\n")
    shutil.copytree(tiny, tmp_path / "lightkv" / "models" / "org--converted")
    (tmp_path / "lightkv" / "models" / ".org--other.partial").mkdir()
    for name, commit in (("whole", "a" * 40), ("part", "b" * 40)):
        repo = hub / f"models--org--{name}"
        (repo / "refs").mkdir(parents=True)
        (repo / "refs" / "main").write_text(commit)
        shutil.copytree(tiny, repo / "snapshots" / commit)
    (hub / "models--org--part" / "snapshots" / commit / "tokenizer.json").unlink()
    (hub / "models--org--empty").mkdir()
    code, out, _ = run("list")
    converted, part, whole = out.splitlines()
    assert code == 0
    num_bytes = sum(file.stat().st_size for file in tiny.iterdir())
    for name, line in (("converted", converted), ("whole", whole)):
        assert line.split() == [f"org/{name}", f"{num_bytes / 2**30:.2f}", "GiB", "runs"]
    assert part.startswith("org/part ")
    assert "does not run" in part
    assert "lacks tokenizer.json" in part
