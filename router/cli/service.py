"""The command `lightkv serve`, which starts a service. The module that starts processes is imported inside the
command, so that help and wrong options answer at once."""

from dataclasses import replace
from typing import Annotated

import typer
from rich.console import Console

from lightkv.errors import require_packages
from lightkv.router.config import EngineConfig, ServiceConfig

from .config_file import set_defaults
from .options import takes_engine, takes_service

EXAMPLES = (
    "lightkv serve",
    "lightkv serve ./my-model --port 9000 --max-total-tokens 200000",
    "lightkv serve --config service.toml --log-requests",
    "LIGHTKV_API_KEY=… lightkv serve --host 0.0.0.0 --ssl-certfile cert.pem --ssl-keyfile key.pem",
    """curl localhost:8000/v1/completions -H 'Content-Type: application/json' -d '{"prompt": "Hi"}'""",
)


@takes_engine
@takes_service
def serve(
    served: Annotated[
        str | None, typer.Argument(help="The same as --model.", show_default=False, metavar="MODEL")
    ] = None,
    *,
    context: typer.Context,
    config_file: Annotated[
        str | None,
        typer.Option(
            "--config",
            help="File in TOML with any of these options, such as max-num-seqs = 64. The command line wins.",
            callback=set_defaults,
            is_eager=True,
            show_default=False,
        ),
    ] = None,
    config: EngineConfig,
    service: ServiceConfig,
) -> None:
    """Serve a model over HTTP with OpenAI's API, until Ctrl-C.

    Prints one line with the URL to standard output once the service is ready. The first Ctrl-C (or SIGTERM)
    lets running requests finish within --shutdown-timeout; a second one ends them at once.
    """
    if served is not None:
        source = context.get_parameter_source("model")
        is_given = source is not None and source.name == "COMMANDLINE"
        if is_given and config.model != served:
            raise typer.BadParameter(
                f"MODEL is {served} and --model is {config.model}; leave one of them out"
            )
        config = replace(config, model=served)
    if config.kv_events is not None:
        require_packages("--kv-events", "events", "zmq")
        from lightkv.router.service.kv_events.sockets import check_endpoint

        check_endpoint(config.kv_events)
    from lightkv.router.service import launch
    from lightkv.router.service.log_stream import write_in_background

    write_in_background(also_stdout=True)

    raise typer.Exit(launch.serve(config, service, Console(stderr=True, highlight=False)))
