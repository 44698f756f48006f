"""The two sockets of the KV events: PUB for what happens, and ROUTER, at the next port, for replays."""

import socket

import zmq

from lightkv.errors import LightKVError

MAX_BATCHES = 10_000  # that are kept for replays
MAX_TAKEN = 16  # requests for replays that are answered before what has changed is published
QUEUED_BATCHES = MAX_BATCHES + 1024  # of replays, that ZeroMQ holds for one consumer
_QUEUED_BATCHES = 1000  # for each subscriber
_MAX_MESSAGE_BYTES = 1024  # of what others send here: subscriptions and requests
_LINGER_MS = 200  # for what is not sent yet at the end


class CannotPublish(LightKVError):
    """KV events cannot be published, since their ports are taken. Nothing is left open."""


class Sockets:
    """The two sockets, listening. `endpoint`, `replay_endpoint`: where. Raises CannotPublish."""

    def __init__(self, endpoint: str) -> None:
        host, _, number = endpoint.removeprefix("tcp://").rpartition(":")  # as the configuration has checked
        port = int(number)
        self._context = zmq.Context()
        self.pub = self._context.socket(zmq.PUB)
        self.replay = self._context.socket(zmq.ROUTER)
        self.pub.setsockopt(zmq.SNDHWM, _QUEUED_BATCHES)
        self.replay.setsockopt(zmq.SNDHWM, QUEUED_BATCHES)
        self.replay.setsockopt(zmq.RCVHWM, MAX_TAKEN)  # requests of each connection that are not taken yet
        self.replay.setsockopt(zmq.ROUTER_MANDATORY, 1)  # sending fails where a consumer takes no more
        for one in (self.pub, self.replay):
            one.setsockopt(zmq.LINGER, _LINGER_MS)
            one.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
            one.setsockopt(zmq.TCP_KEEPALIVE, 1)
            one.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 60)
        try:
            self.endpoint = _listen(self.pub, host, port)
            self.replay_endpoint = _listen(self.replay, host, port + 1 if port else 0)
        except CannotPublish:
            self.close()
            raise

    def close(self) -> None:
        self.pub.close()
        self.replay.close()
        self._context.term()


def check_endpoint(endpoint: str) -> None:
    """Raises CannotPublish unless `endpoint`, the address of a configuration, and its next port are free."""
    Sockets(endpoint).close()


def _listen(one: "zmq.Socket[bytes]", host: str, port: int) -> str:
    """Lets a socket listen. Returns where. Raises CannotPublish."""
    try:
        if host != "*":  # ZeroMQ takes no names here
            given = host.removeprefix("[").removesuffix("]")
            family, _, _, _, address = socket.getaddrinfo(given, port or None, type=socket.SOCK_STREAM)[0]
            host = f"[{address[0]}]" if family == socket.AF_INET6 else str(address[0])
            one.setsockopt(zmq.IPV6, family == socket.AF_INET6)
        one.bind(f"tcp://{host}:{port}")
    except (OSError, UnicodeError, zmq.ZMQError) as error:  # of which the last is no OSError
        raise CannotPublish(
            f"--kv-events cannot listen on {host} port {port} ({error}); it takes the given port and, for "
            "replays, the next one: stop the process that listens there, or give another tcp://HOST:PORT"
        ) from error
    return one.getsockopt_string(zmq.LAST_ENDPOINT)
