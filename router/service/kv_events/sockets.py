"""The two sockets of the KV events: PUB for what happens, and ROUTER, at the next port, for replays."""

import re
import resource
import socket
from contextlib import suppress

import zmq
from zmq.utils.monitor import recv_monitor_message

from lightkv.errors import LightKVError

from .replay import MAX_TAKEN, QUEUED_BATCHES

_ENDPOINT = re.compile(r"tcp://(?P<host>\*|\[[^\[\]]+\]|[^:\[\]]+):(?P<port>\d+)")
_QUEUED_BATCHES = 1000  # for each subscriber
_MAX_MESSAGE_BYTES = 1024  # of what others send here: subscriptions and requests
_LINGER_MS = 200  # for what is not sent yet at the end
MAX_CONNECTIONS = 64  # of one socket
_DESCRIPTORS_EACH = 4  # a connection per so many descriptors of a process, where it has few of them
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED


class CannotPublish(LightKVError):
    """KV events cannot be published, since their ports are taken. Nothing is left open."""


class Sockets:
    """The two sockets, listening. `endpoint`, `replay_endpoint`: where; `connections`: those of each. Raises
    CannotPublish."""

    def __init__(self, endpoint: str) -> None:
        found = _ENDPOINT.fullmatch(endpoint)
        assert found is not None, endpoint  # the configuration has checked it
        port = int(found["port"])
        self._context = zmq.Context()
        self.pub = self._context.socket(zmq.PUB)
        self.replay = self._context.socket(zmq.ROUTER)
        self.pub.setsockopt(zmq.SNDHWM, _QUEUED_BATCHES)
        self.replay.setsockopt(zmq.SNDHWM, QUEUED_BATCHES)
        self.replay.setsockopt(zmq.RCVHWM, MAX_TAKEN)  # requests of each connection that are not taken yet
        self.replay.setsockopt(
            zmq.ROUTER_MANDATORY, 1
        )  # so that sending fails where a consumer takes no more
        for one in (self.pub, self.replay):
            one.setsockopt(zmq.LINGER, _LINGER_MS)
            one.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
            one.setsockopt(zmq.TCP_KEEPALIVE, 1)
            one.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 60)
        self.connections = [Connections(one) for one in (self.pub, self.replay)]
        try:
            self.endpoint = _listen(self.pub, found["host"], port)
            self.replay_endpoint = _listen(self.replay, found["host"], port + 1 if port else 0)
        except CannotPublish:
            self.close()
            raise

    def close(self) -> None:
        for one in self.connections:
            one.close()
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


class Connections:
    """Bounds the connections of `listening`, which does not listen yet, since ZeroMQ accepts all.

    Each takes a descriptor of the router's process, and what ZeroMQ queues for it. Without descriptors no other
    worker could be started, and ZeroMQ's own thread would try to accept without a pause.

    Attributes:
        monitor: can be read from (polled) when some have come or gone, which `watch` then takes note of.
        most: how many there may be.
    """

    def __init__(self, listening: "zmq.Socket[bytes]") -> None:
        self.most = min(MAX_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // _DESCRIPTORS_EACH)
        self.monitor = listening.get_monitor_socket(_EVENTS)
        self._listening = listening
        self._descriptors: set[int] = set()

    def watch(self) -> None:
        """Notes which connections have come and gone. One that comes while there are `most` is ended."""
        while self.monitor.poll(0):
            event = recv_monitor_message(self.monitor)
            descriptor = event["value"]
            if event["event"] == zmq.EVENT_DISCONNECTED:
                self._descriptors.discard(descriptor)
                continue
            if len(self._descriptors) >= self.most:
                self._end(descriptor, event["endpoint"])
            self._descriptors.add(descriptor)  # until ZeroMQ has noticed the end

    def close(self) -> None:
        """Ends the watch."""
        self._listening.disable_monitor()
        self.monitor.close(0)

    def _end(self, descriptor: int, endpoint: bytes) -> None:
        """Shuts a connection down, which ZeroMQ closes then. It may have done so by now, and the descriptor may
        be of something else."""
        with suppress(OSError):
            connection = socket.socket(fileno=descriptor)
            try:
                if connection.getsockname()[1:2] == (int(endpoint.rpartition(b":")[2]),):
                    connection.shutdown(socket.SHUT_RDWR)
            finally:
                connection.detach()
