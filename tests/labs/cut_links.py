"""The connections of one host to servers, which can be cut: nothing goes through them then, and nobody is told so.

What was sent meanwhile arrives when they are mended, as the kernel's TCP would send it again.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from urllib.parse import SplitResult, urlsplit

READ_SIZE = 1 << 16


class Links:
    """Forwards, in threads of its own, what comes to `endpoints` to the servers, until it is closed."""

    def __init__(self, servers: Sequence[str]) -> None:
        """``servers``: URLs."""
        self.endpoints: list[str] = []
        self._whole = threading.Event()
        self._whole.set()
        self._listeners: list[socket.socket] = []
        self._open: set[socket.socket] = set()
        for server in servers:
            listener = socket.create_server(("127.0.0.1", 0))
            self._listeners.append(listener)
            self.endpoints.append(f"http://127.0.0.1:{listener.getsockname()[1]}")
            threading.Thread(target=self._accept, args=(listener, urlsplit(server)), daemon=True).start()

    def cut(self) -> None:
        self._whole.clear()

    def mend(self) -> None:
        self._whole.set()

    def close(self) -> None:
        self.mend()
        for one in [*self._listeners, *self._open]:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self, listener: socket.socket, server: SplitResult) -> None:
        with suppress(OSError):  # it was closed
            while True:
                client, _ = listener.accept()
                threading.Thread(target=self._join, args=(client, server), daemon=True).start()

    def _join(self, client: socket.socket, server: SplitResult) -> None:
        self._whole.wait()
        try:
            target = socket.create_connection((server.hostname, server.port))
        except OSError:  # the server is dead: so is the connection
            client.close()
            return
        self._open |= {client, target}
        back = threading.Thread(target=self._forward, args=(target, client), daemon=True)
        back.start()
        self._forward(client, target)
        back.join()
        self._open -= {client, target}
        client.close()
        target.close()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(READ_SIZE):
                self._whole.wait()
                sink.sendall(data)
        for one in (source, sink):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
