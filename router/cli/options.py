"""The options of commands. They are made from the fields of the settings and of the sampling parameters, so
that defaults, types and checks stand in one place."""

import functools
import inspect
import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Annotated, Any, TypeVar, get_type_hints

import msgspec
import typer
from rich.markup import escape

from lightkv.router.config import (
    API_KEY_VARIABLE,
    METRICS_KEY_VARIABLE,
    EngineConfig,
    ServiceConfig,
    bounds,
    declared,
    flag,
)
from lightkv.router.sampling_params import RECOMMENDED, SamplingParams
from lightkv.router.simulate.config import SimulationConfig

T = TypeVar("T")

Url = Annotated[str, typer.Option(help="Address of the service; unix:PATH for a unix socket.")]
ApiKey = Annotated[
    str | None, typer.Option(help="The service's API key, if it has one.", envvar=API_KEY_VARIABLE)
]

CaCert = Annotated[
    str | None,
    typer.Option(
        "--cacert",
        help="PEM file of certificates to trust, for an https address with a certificate "
        "of your own. Default: those of the system.",
    ),
]

_SAMPLING_HELP = {
    "max_tokens": "The most tokens to generate.",
    "temperature": "Divides the logits: 0 always takes the likeliest token, 1 samples as trained.",
    "top_p": "Sample among the likeliest tokens that together have this probability; 1: among all.",
    "top_k": "Sample among this many likeliest tokens; 0: among all.",
    "min_p": "Leave out tokens that are less likely than this share of the likeliest token.",
    "seed": "Makes an answer repeatable. Default: a different answer each time.",
    "stop": "End the answer before this text; may be given several times.",
    "n": "Number of answers to each prompt.",
}


def examples(*lines: str) -> str:
    """Returns the epilog of a command's help: a heading, then one example a line."""
    return "\n\n".join(("[bold]Examples[/]", *lines))


def _option(name: str, kind: Any, default: Any, text: str, panel: str) -> inspect.Parameter:
    """Returns a command's parameter that typer reads as the option `--name`."""
    names = flag(name)
    if kind is bool and default:
        names += f"/--no-{names[2:]}"
    option = typer.Option(names, help=escape(text), rich_help_panel=panel)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
    )


def _with_range(text: str, owner: type, name: str) -> str:
    """Returns the help of an option, and the range that its field declares. Typer's own `min` and `max` are
    part of a range, and 0 is not part of most ranges of seconds."""
    meta = declared(owner)[name].meta
    return f"{text} [{said}]" if meta is not None and (said := bounds(meta)) else text


def _config_options(
    config: type[EngineConfig | ServiceConfig | SimulationConfig], panel: str
) -> list[inspect.Parameter]:
    kinds = get_type_hints(config)  # without the ranges, which the configuration itself checks
    options = []
    for field in fields(config):
        kind, default = kinds[field.name], field.default
        if kind == tuple[str, ...]:  # an option that may be given several times
            kind, default = list[str], None
        text = _with_range(field.metadata["help"], config, field.name)
        options.append(_option(field.name, kind, default, text, panel))
    return options


def _sampling_options() -> list[inspect.Parameter]:
    kinds = get_type_hints(SamplingParams)
    defaults = {field.name: field.default for field in msgspec.structs.fields(SamplingParams)}
    options = []
    for name, text in _SAMPLING_HELP.items():
        kind, default = (list[str], None) if name == "stop" else (kinds[name], defaults[name])
        if name in RECOMMENDED:
            kind, default = kind | None, None
            text += f" Default: what the model recommends, or {defaults[name]:g}."
        options.append(_option(name, kind, default, _with_range(text, SamplingParams, name), "Sampling"))
    return options


def _with_options(
    argument: str, options: Sequence[inspect.Parameter], make: Callable[[dict[str, Any]], object]
) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Returns a decorator that replaces a command's `argument` by `options`. The command is called with what
    `make` returns for their values."""

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


def _stated(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the sampling parameters that the command line states. Raises InvalidParams."""
    stated = {name: value for name, value in values.items() if value is not None}
    SamplingParams(**stated)
    return stated


def _service_config(values: dict[str, Any]) -> ServiceConfig:
    """Returns the settings of a service. Keys that no option gives are taken from the environment."""
    several = {name: tuple(values[name] or ()) for name in _SEVERAL}
    for name, variable in (("api_key", API_KEY_VARIABLE), ("metrics_key", METRICS_KEY_VARIABLE)):
        if not several[name] and (key := os.environ.get(variable)):
            several[name] = (key,)
    return ServiceConfig(**values | several)


def _simulation_configs(values: dict[str, Any]) -> tuple[SimulationConfig, ...]:
    """Returns the settings of each policy: every allocation that is named with every admission."""
    allocations, admissions = (
        dict.fromkeys(name.strip() for name in given.split(",")) if given else [given]
        for given in (values["allocation"], values["admission"])
    )
    return tuple(
        SimulationConfig(**values | {"allocation": allocation, "admission": admission})
        for allocation, admission in itertools.product(allocations, admissions)
    )


_SEVERAL = [field.name for field in fields(ServiceConfig) if field.default == ()]
takes_engine = _with_options(
    "config", _config_options(EngineConfig, "Engine"), lambda values: EngineConfig(**values)
)
takes_service = _with_options("service", _config_options(ServiceConfig, "Service"), _service_config)
takes_simulations = _with_options(
    "configs", _config_options(SimulationConfig, "Simulation"), _simulation_configs
)
takes_sampling = _with_options("stated", _sampling_options(), _stated)
