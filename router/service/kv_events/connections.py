"""Bounds the connections of a listening socket, since ZeroMQ accepts all that come.

Each takes a descriptor of the router's process, and what ZeroMQ queues for it. Without descriptors no other
worker could be started, and ZeroMQ's own thread would try to accept without a pause.
"""

import resource
import socket
from contextlib import suppress

import zmq
from zmq.utils.monitor import recv_monitor_message

MAX_CONNECTIONS = 64  # of one socket
_DESCRIPTORS_EACH = 4  # a connection per so many descriptors of a process, where it has few of them
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED


class Connections:
    """The connections of `listening`, which does not listen yet.

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
