"""The command `lightkv`: what was typed, made into settings, sampling parameters and prompts.

Knows typer and the names and texts of options; every default and every check is the settings' own. What
needs torch is imported inside the commands, so that help and bad options answer at once.

Exit codes: 0 done, 1 failed, 2 bad input, 130 interrupted.
"""

import functools
import inspect
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast, get_type_hints

import msgspec
import typer
from rich.console import Console
from typer.core import TyperGroup

from lightkv import __version__
from lightkv.errors import LightKVError, UnknownBackend, UnsupportedModel
from lightkv.router.config import EngineConfig, InvalidConfig, ServiceConfig
from lightkv.router.sampling_params import InvalidParams, SamplingParams
from lightkv.router.simulate.config import InvalidAllocation, InvalidSimulation, SimulationConfig
from lightkv.router.simulate.output_file import UnwritableFile
from lightkv.router.terminal import OrderedAnswers, headings, progress, say, usage

from .service import add_service_commands
from .simulate import UnreadableResult, add_simulate_commands

if TYPE_CHECKING:
    from lightkv.router.text.tokenizer import Tokenizer

T = TypeVar("T")

_SAMPLING_HELP = {
    "max_tokens": "Tokens to generate at most.",
    "temperature": "What logits are divided by: 0 always takes the likeliest token, 1 samples as trained.",
    "top_p": "Sample among the likeliest tokens that together have this probability; 1: among all.",
    "top_k": "Sample among this many likeliest tokens; 0: among all.",
    "min_p": "Leave out tokens less likely than this share of the likeliest one.",
    "seed": "Makes the same answer come again. Default: another one each time.",
    "stop": "End the answer before this text; may be given several times.",
    "n": "Answers to each prompt.",
}


# --------------------------------------------------------------------------------
# From fields to options


def _option(name: str, kind: Any, default: Any, text: str, panel: str) -> inspect.Parameter:
    """A command's parameter that typer reads as the option `--name`."""
    flag = "--" + name.replace("_", "-")
    names = [f"{flag}/--no-{flag[2:]}" if default else flag] if kind is bool else [flag]
    option = typer.Option(*names, help=text, rich_help_panel=panel)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
    )


def _config_options(
    config: type[EngineConfig] | type[ServiceConfig] | type[SimulationConfig], panel: str
) -> list[inspect.Parameter]:
    kinds = get_type_hints(config)
    options = []
    for field in fields(config):
        kind, default = kinds[field.name], field.default
        if kind == tuple[str, ...]:  # an option that may be given several times
            kind, default = list[str], None
        options.append(_option(field.name, kind, default, field.metadata["help"], panel))
    return options


def _sampling_options() -> list[inspect.Parameter]:
    known = {field.name: field for field in msgspec.structs.fields(SamplingParams)}
    options = []
    for name, text in _SAMPLING_HELP.items():
        kind = list[str] if name == "stop" else known[name].type
        default = None if name == "stop" else known[name].default
        options.append(_option(name, kind, default, text, "Sampling"))
    return options


def _with_options(
    argument: str, options: Sequence[inspect.Parameter], make: Callable[[dict[str, Any]], object]
) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Puts `options` in the place of a command's `argument`, which becomes what `make` makes of them."""

    def decorate(command: Callable[..., T]) -> Callable[..., T]:
        signature = inspect.signature(command)
        own = [parameter for parameter in signature.parameters.values() if parameter.name != argument]

        @functools.wraps(command)
        def run(**values: Any) -> T:
            made = make({option.name: values.pop(option.name) for option in options})
            return command(**values, **{argument: made})

        parameters = [*own, *options]
        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


_takes_engine = _with_options(
    "config", _config_options(EngineConfig, "Engine"), lambda values: EngineConfig(**values)
)
_takes_service = _with_options(
    "service",
    _config_options(ServiceConfig, "Service"),
    lambda values: ServiceConfig(**values | {"api_key": tuple(values["api_key"] or ())}),
)
_takes_simulation = _with_options(
    "config", _config_options(SimulationConfig, "Simulation"), lambda values: SimulationConfig(**values)
)
_takes_sampling = _with_options(
    "params", _sampling_options(), lambda values: SamplingParams(**values | {"stop": values["stop"] or ()})
)


# --------------------------------------------------------------------------------
# The commands


class _Commands(TyperGroup):
    """Ends what lightkv raises on purpose in one line and an exit code, whichever the command."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except LightKVError as error:
            Console(stderr=True, highlight=False).print(f"lightkv: {error}", markup=False, soft_wrap=True)
            raise typer.Exit(2 if _is_bad_input(error) else 1) from None


app = typer.Typer(
    cls=_Commands,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Run a language model on token-level KV memory: a request is admitted by an exact count of tokens, "
    "and what prompts have in common is computed and held once.",
    epilog="\n\n".join(
        [
            '[bold]lightkv generate "What is the capital of France?"[/]   answer, streamed',
            "[bold]lightkv serve[/]   the same over HTTP, as OpenAI speaks it",
            "[bold]lightkv info[/]   the device, and how many tokens fit beside the model",
            "[bold]lightkv simulate[/]   a trace of requests through the scheduler, on a simulated device",
            "[bold]lightkv generate --help[/]   all options, with examples",
        ]
    ),
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lightkv {__version__}")
        raise typer.Exit


@app.callback()
def _lightkv(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal that cannot show a character shows "?" instead
            stream.reconfigure(errors="replace")


@app.command(
    epilog="\n\n".join(
        [
            "[bold]Examples[/]",
            'lightkv generate "Name three rivers."',
            'lightkv generate --temperature 0 --max-tokens 40 --raw "The capital of France is"',
            'lightkv generate --system "Answer in one sentence." "What is a token?" "What is a cache?"',
            "git diff | lightkv generate --system 'Summarise this change.' - > summary.txt",
            "lightkv generate --model ./my-model --seed 7 --n 3 'Once upon a time'",
        ]
    )
)
@_takes_engine
@_takes_sampling
def generate(
    prompts: Annotated[
        list[str] | None,
        typer.Argument(
            help='What to answer; "-" reads standard input (less its last line end), as does no prompt at the '
            "end of a pipe. Several are answered together and printed in order, under headings.",
            show_default=False,
            metavar="PROMPT",
        ),
    ] = None,
    *,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="--chat: ask it as a user, in the model's chat template. --raw: let the model continue the "
            "text as it is. Default: chat where the model has a template.",
        ),
    ] = None,
    system: Annotated[
        str | None, typer.Option(help="What the model is told before each prompt; needs --chat.")
    ] = None,
    config: EngineConfig,
    params: SamplingParams,
) -> None:
    """Answer prompts, streamed to standard output.

    Standard output carries the answers alone; progress and what they took go to standard error.
    """
    if system is not None and chat is False:
        raise typer.BadParameter("--system is a chat's, and --raw asks for none; leave one of them out")
    texts = _read_prompts(prompts)
    notes = Console(stderr=True)
    with progress(notes, f"looking for {config.model}") as report:
        report("importing torch")
        from lightkv.router.llm import LLM

        llm = LLM(config, report)
        if chat is None:
            chat = _takes_chat(llm.tokenizer)
            report("answering as a chat" if chat else "continuing the text (this model has no chat template)")
    before = [] if system is None else [{"role": "system", "content": system}]
    wanted = [[*before, {"role": "user", "content": text}] if chat else text for text in texts]

    answers = OrderedAnswers(sys.stdout, headings(texts, params.n))
    num_new = num_cut = 0
    started = time.perf_counter()
    try:
        for chunk in llm.stream(wanted, params):
            num_new += len(chunk.token_ids)
            num_cut += chunk.finish_reason == "length"
            answers.add(
                chunk.prompt_idx * params.n + chunk.index, chunk.text, chunk.finish_reason is not None
            )
    except KeyboardInterrupt:
        answers.interrupt()
        say(notes, "interrupted")
        raise
    stats = llm.stats()
    line = usage(stats.prompt_tokens, stats.hit_tokens, num_new, time.perf_counter() - started)
    cut = f"; {num_cut} of {len(texts) * params.n} cut off at --max-tokens {params.max_tokens}"
    say(notes, line + (cut if num_cut else ""))


@app.command(
    epilog="\n\n".join(
        [
            "[bold]Examples[/]",
            "lightkv info",
            "lightkv info --model ./my-model --device cuda:1 --mem-fraction 0.8",
            "lightkv info --json | jq .model.pool_tokens",
        ]
    )
)
@_takes_engine
def info(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, for programs.")] = False,
    *,
    config: EngineConfig,
) -> None:
    """Tell the device, the versions, and what the pool would hold and why.

    The weights are not loaded: the model is checked and sized from its files' headers. On a GPU the figures
    are for what is free now.
    """
    notes = Console(stderr=True)
    with progress(notes, f"looking for {config.model}") as report:
        from lightkv.router.model_files import resolve

        directory = resolve(config.model, report)
        report("importing torch")
        from lightkv.router.model.info import machine_info, model_info

        machine = machine_info(config)
        report(f"sizing {directory}")
        model = model_info(config, directory)
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode({"machine": machine, "model": model})).decode())
        return
    memory = (
        f", {_gib(machine.free_bytes)} of {_gib(machine.total_bytes)} free" if machine.total_bytes else ""
    )
    heads = f"{model.num_layers} layers x {model.num_kv_heads} K/V heads x ({model.k_dim} + {model.v_dim})"
    chunk = f"{model.prefill_chunk:,} prompt tokens" if model.prefill_chunk else "all prompt tokens"
    rows = {
        **machine.versions,
        "device": f"{machine.device} ({machine.device_name}{memory})",
        "model": f"{model.model}, in {model.directory}",
        "architecture": f"{model.architecture}, attention by {model.attention_backend}",
        "weights": f"{_gib(model.weight_bytes)}: {model.num_parameters:,} parameters in {model.dtype}",
        "one token": f"{model.bytes_per_token:,} bytes: {heads} in {model.dtype}",
        "pool": f"{model.pool_tokens:,} tokens in {_gib(model.pool_bytes)}",
        "": model.pool_reason,
        "requests": f"{model.max_num_seqs} at once, of {model.max_model_len:,} tokens each at most",
        "step": f"{chunk} at most",
    }
    for name, value in rows.items():
        typer.echo(f"{name:<14}{value}")


add_service_commands(app, _takes_engine, _takes_service)
add_simulate_commands(app, _takes_simulation)


def _read_prompts(prompts: Sequence[str] | None) -> list[str]:
    """The prompts given, "-" replaced by standard input. Raises BadParameter for none or an empty one."""
    if not prompts:
        if sys.stdin is None or sys.stdin.isatty():
            raise typer.BadParameter('no prompt; give one in quotes, or "-" and a text on standard input')
        prompts = ["-"]
    if prompts.count("-") > 1:
        raise typer.BadParameter('standard input can be read once; give "-" once')
    texts = [_read_stdin() if prompt == "-" else prompt for prompt in prompts]
    for idx, (prompt, text) in enumerate(zip(prompts, texts, strict=True), start=1):
        if not text:
            origin = "standard input" if prompt == "-" else f"prompt {idx}"
            raise typer.BadParameter(f"{origin} is empty; give at least one character")
    return texts


def _read_stdin() -> str:
    try:
        return sys.stdin.buffer.read().decode().removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"standard input is no UTF-8 text ({error}); convert it first") from None


def _takes_chat(tokenizer: "Tokenizer") -> bool:
    """Whether the model has a chat template that a plain question fits."""
    from lightkv.router.text.tokenizer import ChatTemplateError

    try:
        tokenizer.render_chat([{"role": "user", "content": "?"}])
    except ChatTemplateError:
        return False
    return True


def _is_bad_input(error: LightKVError) -> bool:
    """Whether the remedy is another command line, rather than a machine with more room or a mended bug."""
    from lightkv.router.engine.request import NeverFits
    from lightkv.router.engine.step_time import InvalidStepTime
    from lightkv.router.model_files import ModelNotFound, UnreadableWeights
    from lightkv.router.simulate.traces import UnreadableTrace
    from lightkv.router.text.tokenizer import ChatTemplateError, UnreadableTokenizer

    settings = (InvalidConfig, InvalidParams, UnknownBackend, NeverFits, ChatTemplateError)
    models = (ModelNotFound, UnreadableTokenizer, UnreadableWeights, UnsupportedModel)
    simulations = (InvalidSimulation, InvalidAllocation, InvalidStepTime, UnreadableTrace)
    files = (UnreadableResult, UnwritableFile)
    return isinstance(error, settings + models + simulations + files)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


def main() -> None:
    """The entry point of the command."""
    cast(Callable[[], None], app)()


if __name__ == "__main__":
    main()
