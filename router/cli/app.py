"""The command `lightkv`, with its subcommands `generate` and `info`; the other subcommands are added from
their files.

Modules that need torch are imported inside the commands, so that help and wrong options answer at once. Exit
codes: 0 success, 1 failure, 2 wrong input, 130 interrupted.
"""

import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, cast

import msgspec
import typer
from rich.console import Console
from typer.core import TyperGroup

from lightkv import __version__
from lightkv.errors import LightKVError, UnknownBackend, UnsupportedModel
from lightkv.router.config import EngineConfig, InvalidConfig
from lightkv.router.peer_names import unknown_option
from lightkv.router.sampling_params import InvalidParams, SamplingParams
from lightkv.router.simulate.config import InvalidSimulation
from lightkv.router.terminal import Answers, headings, progress, say, usage

from . import chat, monitor, service, simulate
from .options import examples, takes_engine, takes_sampling

if TYPE_CHECKING:
    from lightkv.router.text.tokenizer import Tokenizer


class _Commands(TyperGroup):
    """Ends every command that raises a LightKVError with one line on standard error and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except LightKVError as error:
            Console(stderr=True, highlight=False).print(f"lightkv: {error}", markup=False, soft_wrap=True)
            raise typer.Exit(2 if _is_bad_input(error) else 1) from None
        except Exception as error:
            _name_ours(error)
            raise


def _name_ours(error: Any) -> None:
    """Adds to the error of an unknown option, whose class is typer's or click's, what to give instead."""
    takes_settings = type(error).__name__ == "NoSuchOption" and any(
        option.name == "mem_fraction" for option in error.ctx.command.params
    )
    if takes_settings and (remedy := unknown_option(error.option_name)):
        error.message, error.possibilities = f"No such option: {error.option_name}: {remedy}", None


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Run a language model with a KV cache managed token by token: requests are admitted by an exact count "
    "of tokens, and common prefixes of prompts are computed and stored once.",
    epilog="\n\n".join(
        [
            '[bold]lightkv generate "What is the capital of France?"[/]   stream an answer',
            "[bold]lightkv serve[/]   serve the model over HTTP with OpenAI's API",
            "[bold]lightkv info[/]   show the device, and how many tokens fit beside the model",
            "[bold]lightkv simulate[/]   run a trace of requests through the scheduler on a simulated device",
            "[bold]lightkv generate --help[/]   show all options, with examples",
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
        if hasattr(stream, "reconfigure"):  # characters that the terminal cannot show become "?"
            stream.reconfigure(errors="replace")


@app.command(
    epilog=examples(
        'lightkv generate "Name three rivers."',
        'lightkv generate --temperature 0 --max-tokens 40 --raw "The capital of France is"',
        'lightkv generate --system "Answer in one sentence." "What is a token?" "What is a cache?"',
        "git diff | lightkv generate --system 'Summarise this change.' - > summary.txt",
        "lightkv generate --model ./my-model --seed 7 --n 3 'Once upon a time'",
    )
)
@takes_engine
@takes_sampling
def generate(
    prompts: Annotated[
        list[str] | None,
        typer.Argument(
            help='The prompt; "-" reads it from standard input (without its last line end), and so does '
            "leaving it out in a pipe. Several prompts are answered together and printed in order, under "
            "headings.",
            show_default=False,
            metavar="PROMPT",
        ),
    ] = None,
    *,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="--chat: send the prompt as a user's message, in the model's chat template. --raw: let the "
            "model continue the text as it is. Default: --chat if the model has a template.",
        ),
    ] = None,
    system: Annotated[
        str | None, typer.Option(help="System message before each prompt; needs --chat.")
    ] = None,
    config: EngineConfig,
    stated: dict[str, Any],
) -> None:
    """Answer prompts, streamed to standard output.

    Standard output carries the answers alone; progress, token counts and times go to standard error.
    """
    if system is not None and chat is False:
        raise typer.BadParameter("--system needs a chat and --raw makes none; leave one of them out")
    texts = _read_prompts(prompts)
    notes = Console(stderr=True)
    with progress(notes, f"looking for {config.model}") as report:
        from lightkv.router.model_files import resolve
        from lightkv.router.text.tokenizer import Tokenizer, UnreadableTokenizer

        directory = resolve(config.model, report, config.revision)
        try:
            tokenizer = Tokenizer(directory)
        except UnreadableTokenizer:
            from lightkv.router.model.build import find_model

            find_model(config, report)  # that a model cannot run matters more than what its tokenizer lacks
            raise
        params = SamplingParams(**tokenizer.recommended | stated)
        if chat is None:
            chat = _has_chat_template(tokenizer)
            report("answering as a chat" if chat else "continuing the text (this model has no chat template)")
        before = [] if system is None else [{"role": "system", "content": system}]
        inputs = [[*before, {"role": "user", "content": text}] if chat else text for text in texts]
        for one in inputs:  # before anything that takes long
            ids = tokenizer.encode(one) if isinstance(one, str) else tokenizer.encode_chat(one)
            _check_fits(len(ids), params.max_tokens, config, tokenizer.max_model_len)
        report("importing torch")
        from lightkv.router.llm import LLM

        llm = LLM(config, report)

    answers = Answers(sys.stdout, headings(texts, params.n))
    num_new = num_cut = 0
    started = time.perf_counter()
    try:
        for chunk in llm.stream(inputs, params):
            num_new += len(chunk.token_ids)
            num_cut += chunk.finish_reason == "length"
            answers.add(chunk.prompt_idx * params.n + chunk.index, chunk.text)
    except KeyboardInterrupt:
        say(notes, "interrupted")
        raise
    finally:
        answers.end()
    stats = llm.stats()
    line = usage(stats.prompt_tokens, stats.hit_tokens, num_new, time.perf_counter() - started)
    cut = f"; {num_cut} of {len(texts) * params.n} cut off at --max-tokens {params.max_tokens}"
    say(notes, line + (cut if num_cut else ""))


@app.command(
    epilog=examples(
        "lightkv info",
        "lightkv info --model ./my-model --device cuda:1 --mem-fraction 0.8",
        "lightkv info --kv-dtype int8",
        "lightkv info --json | jq .model.pool_slots",
    )
)
@takes_engine
def info(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, for programs.")] = False,
    *,
    config: EngineConfig,
) -> None:
    """Show the device, the versions, the size of the K/V pool and the reason for it.

    The weights are not loaded: the model is checked and its size read from the headers of its files. On a GPU
    the figures hold for the memory that is free now. With --tensor-parallel they are of one rank, and a number
    of ranks for which the service would not start is refused.
    """
    notes = Console(stderr=True)
    with progress(notes, f"looking for {config.model}") as report:
        from lightkv.router.model_files import resolve

        directory = resolve(config.model, report, config.revision)
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
    heads = " + ".join(
        "{num_layers} layers x {num_kv_heads} K/V heads x ({k_dim} + {v_dim})".format_map(one)
        for one in model["kv_heads"]
    )
    chunk = f"{model['prefill_chunk']:,} prompt tokens" if model["prefill_chunk"] else "all prompt tokens"
    left_out = ", ".join(f"{name} ({_gib(one)})" for name, one in model["left_out"].items())
    state_bytes = f"{_gib(model['state_bytes'])}, of {model['bytes_per_state']:,} bytes each"
    has_groups = len(model["layer_classes"]) > 1  # of layers that do not all see everything
    unused = f", {model['unused_lanes']:.0%} of them unused" if model["unused_lanes"] else ""
    costs = [
        f"{length:,} tokens in {slots:,} slots ({_gib(slots * model['bytes_per_slot'])})"
        for length, slots in model["slots_of_request"].items()
    ]
    rows = {
        **machine.versions,
        "device": f"{machine.device} ({machine.device_name}{memory})",
        "model": f"{model['model']}, in {model['directory']}",
        "architecture": f"{model['architecture']}, attention by {model['attention_backend']}",
        "ranks": f"{model['num_ranks']} run the model together; weights, tokens and pool are of each one's part"
        if model["num_ranks"] > 1
        else "",
        "weights": f"{_gib(model['weight_bytes'])}: {model['num_parameters']:,} parameters in {model['dtype']}",
        "left out": left_out
        and f"{_gib(sum(model['left_out'].values()))} that texts do not need: {left_out}",
        "unfused": "; ".join(f"{count} layers, {why}" for why, count in model["unfused"].items()),
        "one token": f"{model['bytes_per_token']:,} bytes: {heads} in {model['kv_dtype']}",
        "layers": "; ".join(model["layer_classes"]) if has_groups else "",
        "one slot": f"{model['bytes_per_slot']:,} bytes{unused}" if has_groups else "",
        "a request": ", ".join(costs) if has_groups else "",
        "pool": f"{model['pool_slots']:,} {'slots' if has_groups else 'tokens'} in {_gib(model['pool_bytes'])}",
        "": model["pool_reason"],
        "states": f"{model['num_states']:,} in {state_bytes}" if model["num_states"] else "",
        "requests": f"{model['max_num_seqs']} at once, of {model['max_model_len']:,} tokens each at most",
        "step": f"{chunk} at most",
    }
    for name, value in rows.items():
        if value:
            typer.echo(f"{name:<14}{value}")


@app.command("list")
def _list() -> None:
    """List the models in lightkv's and the Hugging Face cache, with the bytes of their files, and whether they
    run.

    The weights are not loaded: a model runs if it passes every check that needs none.
    """
    from lightkv.router.model_files import UnreadableWeights, in_line, local_models

    if not (models := local_models()):
        typer.echo("no model is in lightkv's or in the Hugging Face cache")
        return
    with progress(Console(stderr=True), "importing torch"):
        from lightkv.router.model.model_config import load_supported_config
    for model, directory in models.items():
        num_bytes = sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
        runs = "runs"
        try:
            load_supported_config(directory)
        except (UnreadableWeights, UnsupportedModel) as error:
            runs = f"does not run: {in_line(str(error))}"
        typer.echo(f"{model:<48} {_gib(num_bytes):>12}  {runs}")


app.command(epilog=examples(*service.EXAMPLES))(service.serve)
app.command(epilog=examples(*chat.EXAMPLES))(chat.chat)
app.command(epilog=examples(*monitor.TOP_EXAMPLES))(monitor.top)
app.command("map", epilog=examples(*monitor.MAP_EXAMPLES))(monitor.pool_map)
app.command(epilog=examples(*simulate.EXAMPLES))(simulate.simulate)


def _read_prompts(prompts: Sequence[str] | None) -> list[str]:
    """Returns the prompts, with "-" replaced by standard input. Raises BadParameter if there is none or one is
    empty."""
    if not prompts:
        if sys.stdin is None or sys.stdin.isatty():
            raise typer.BadParameter('there is no prompt; give one in quotes, or "-" to read standard input')
        prompts = ["-"]
    if prompts.count("-") > 1:
        raise typer.BadParameter('standard input can be read only once; give "-" once')
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
        raise typer.BadParameter(f"standard input is not UTF-8 text ({error}); convert it first") from None


def _check_fits(num_prompt: int, max_tokens: int, config: EngineConfig, context: int) -> None:
    """Raises NeverFits for a request that no pool or context of these settings could hold. `context`: the
    model's, or 0 if its files do not say."""
    from lightkv.router.engine.request import NeverFits

    longest = min((given for given in (context, config.max_model_len) if given), default=None)
    if longest is not None and num_prompt + max_tokens > longest:
        raise NeverFits(num_prompt, max_tokens, longest)
    capacity = config.max_total_tokens
    if capacity is not None and num_prompt > capacity:
        raise NeverFits(num_prompt, 1, capacity, "pool")


def _has_chat_template(tokenizer: "Tokenizer") -> bool:
    """Returns whether the model has a chat template that can render a single user message."""
    from lightkv.router.text.tokenizer import ChatTemplateError

    try:
        tokenizer.render_chat([{"role": "user", "content": "?"}])
    except ChatTemplateError:
        return False
    return True


def _is_bad_input(error: LightKVError) -> bool:
    """Returns whether another command line would help, rather than more memory or a bug fix."""
    from lightkv.router.engine.request import NeverFits
    from lightkv.router.engine.step_time import InvalidStepTime
    from lightkv.router.model_files import ModelNotFound, UnreadableWeights
    from lightkv.router.simulate.trace_files import UnreadableTrace
    from lightkv.router.text.tokenizer import ChatTemplateError, UnreadableTokenizer

    settings = (InvalidConfig, InvalidParams, UnknownBackend, NeverFits, ChatTemplateError)
    models = (ModelNotFound, UnreadableTokenizer, UnreadableWeights, UnsupportedModel)
    simulations = (InvalidSimulation, InvalidStepTime, UnreadableTrace)
    return isinstance(error, (*settings, *models, *simulations))


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


def main() -> None:
    """Runs the command line; the entry point."""
    cast(Callable[[], None], app)()


if __name__ == "__main__":
    main()
