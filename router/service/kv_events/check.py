"""Whether KV events can be published, found out before anything is loaded. It loads without ZeroMQ."""

from importlib.util import find_spec

from lightkv.errors import LightKVError, how_to_install


class CannotPublish(LightKVError):
    """KV events cannot be published: a package is missing, or their ports are taken. Nothing is left open."""


def check_kv_events(endpoint: str) -> None:
    """Raises CannotPublish unless KV events can be published at `endpoint`, the address of a configuration."""
    if find_spec("zmq") is None:
        raise CannotPublish(
            f"--kv-events needs the package pyzmq, which is not installed; {how_to_install('events')}"
        )
    from .publisher import Sockets

    Sockets(endpoint).close()
