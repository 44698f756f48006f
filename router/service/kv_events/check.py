"""Whether KV events can be published at all. It loads without ZeroMQ."""

from importlib.util import find_spec

from lightkv.errors import LightKVError, how_to_install


class CannotPublish(LightKVError):
    """KV events cannot be published: a package is missing, or their ports are taken. Nothing is left open."""


def require_package() -> None:
    """Raises CannotPublish if ZeroMQ's package is not installed."""
    if find_spec("zmq") is None:
        raise CannotPublish(
            f"--kv-events needs the package pyzmq, which is not installed; {how_to_install('events')}"
        )
