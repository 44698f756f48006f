"""The configuration file of a service: options in TOML, which the command line overrides."""

import difflib
import tomllib
from pathlib import Path
from typing import Any

import typer

from lightkv.router.config import Allowed, EngineConfig, InvalidConfig, ServiceConfig, declared, flag
from lightkv.router.peer_names import unknown_option


def read_config_file(path: Path) -> dict[str, Any]:
    """Returns the settings of a file by the names of their fields.

    A name is that of an option without the dashes before it; "_" may stand for "-". Raises InvalidConfig for a
    file that cannot be read, for an unknown name, with the nearest known one, and for a value of another type.
    """
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # both TOMLDecodeError and UnicodeDecodeError are ValueErrors
        raise InvalidConfig(f"--config {path} cannot be read ({error}); give a file in TOML") from error
    allowed = declared(EngineConfig) | declared(ServiceConfig)
    names = {flag(name).removeprefix("--"): name for name in allowed}
    settings: dict[str, Any] = {}
    for given, value in found.items():
        option = given.replace("_", "-")
        name = names.get(option)
        if name is None:
            near = difflib.get_close_matches(option, names, 1, 0.0)
            remedy = unknown_option(option) or f"the nearest is {near[0]!r}"
            raise InvalidConfig(f"--config {path} names {given!r}, which is no option; {remedy}")
        if name in settings:
            raise InvalidConfig(f"--config {path} names {flag(name)} twice; leave one of them out")
        settings[name] = _checked(path, given, allowed[name], value)
    return settings


def _checked(path: Path, given: str, allowed: Allowed, value: Any) -> Any:
    """Returns the value if the option takes it. Raises InvalidConfig."""
    taken = value
    if allowed.kinds == (tuple[str, ...],) and isinstance(value, str | list):
        taken = (value,) if isinstance(value, str) else tuple(value)
    if not allowed.takes(taken):
        raise InvalidConfig(f"--config {path}: {given} is {value!r}; give {allowed.words}")
    return taken


def set_defaults(context: typer.Context, path: str | None) -> str | None:
    """Makes the settings of the file at `path` the defaults of a command's options."""
    if path is not None and not context.resilient_parsing:  # as while a shell completes a command
        context.default_map = {**(context.default_map or {}), **read_config_file(Path(path))}
    return path
