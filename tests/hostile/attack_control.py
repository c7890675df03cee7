"""``attack_control.py UID MOUNT KIND CONNECTIONS``: a storm of control messages from ``go`` on, until any other line.

KIND: ``messages`` that are refused, from as many connections at once; ``namespaces`` and ``files`` that are registered
and dropped again; ``memory``: iovs, too; ``rings``; ``connects``: connections that say HELLO, and go before they are
answered.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import time
from itertools import cycle
from pathlib import Path

from attacker_kit import (
    ADD_FILE,
    ADD_IOV,
    ADD_RING,
    CLOSE_NAMESPACE,
    DROP_FILE,
    DROP_IOV,
    DROP_RING,
    HELLO,
    MESSAGE,
    OPEN_NAMESPACE,
    Attacker,
    become,
    memfd,
    say,
)

AHEAD = 4
"""requests of a connection that wait for an answer"""
TOGETHER = 32
"""connections"""
IDLE_SECONDS = 0.001
REFUSED = (99, DROP_FILE, HELLO, OPEN_NAMESPACE)


class Storm:
    """The requests of one connection. ``answered``: how many of them have an answer."""

    def __init__(self, mount: Path, kind: str) -> None:
        self.client = Attacker(mount)
        self.client.socket.setblocking(False)
        self.kind = kind
        self.answered = 0
        self._under_way = 0
        self._refused = cycle(REFUSED)
        self._handles: list[int] = []
        self._open = {
            "namespaces": lambda: os.open(mount / "public", os.O_RDONLY | os.O_DIRECTORY),
            "files": lambda: os.open(mount / "public" / "data", os.O_RDONLY),
            "memory": lambda: memfd(4096),
        }
        self._descriptor = self._open[kind]() if kind in self._open else -1

    def go_on(self) -> None:
        """Ask, until nothing more can be asked now; take what was answered."""
        try:
            while self._under_way < AHEAD:
                self._ask()
                self._under_way += 1
        except BlockingIOError:
            pass
        try:
            while True:
                error, values, descriptors = self.client.answer()
                self._under_way -= 1
                self.answered += 1
                if not error and self.kind != "messages" and values[0]:
                    self._handles.append(values[0])
                for descriptor in descriptors:
                    os.close(descriptor)
        except BlockingIOError:
            pass

    def _ask(self) -> None:
        request = self.client.request
        if self.kind == "messages":
            request(next(self._refused), 7)
        elif self._handles:
            drops = {"namespaces": CLOSE_NAMESPACE, "files": DROP_FILE, "memory": DROP_IOV, "rings": DROP_RING}
            request(drops[self.kind], self._handles.pop())
        elif self.kind == "rings":
            request(ADD_RING, 8, 0, 0)
        else:
            kind, value = {
                "namespaces": (OPEN_NAMESPACE, 0o600),
                "files": (ADD_FILE, 1),
                "memory": (ADD_IOV, 4096),
            }[self.kind]
            request(kind, value, descriptors=[self._descriptor])


def connect_and_go(folder: int) -> bool:
    """Wait for no answer. False where the daemon had enough of us."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        try:
            client.connect(f"/proc/self/fd/{folder}/control.sock")
            client.send(MESSAGE.pack(HELLO, 1, 0, 1, *[0] * 5))
        except OSError:
            return False
    return True


def main() -> None:
    uid, mount, kind, count = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    become(uid)
    storms = [Storm(mount, kind) for _ in range(count if kind != "connects" else 0)]
    poll = select.poll()
    poll.register(sys.stdin, select.POLLIN)
    by_descriptor = {storm.client.socket.fileno(): storm for storm in storms}
    say(ready=True)
    is_busy, connected = False, 0
    folder = os.open(mount / ".kvfuse", os.O_PATH)
    while True:
        found = poll.poll(0 if is_busy and kind == "connects" else None)
        if any(descriptor == sys.stdin.fileno() for descriptor, _ in found):
            is_busy = sys.stdin.readline().strip() == "go"
            if is_busy:
                for storm in storms:
                    storm.go_on()
                    poll.register(storm.client.socket, select.POLLIN)
            else:
                for storm in storms:
                    poll.unregister(storm.client.socket)
            say(submitted=connected + sum(storm.answered for storm in storms))
        if is_busy:
            if kind == "connects":
                connected += sum(connect_and_go(folder) for _ in range(TOGETHER))
                time.sleep(IDLE_SECONDS)  # the daemon is what it keeps busy, not the processors
            for descriptor, _ in found:
                if descriptor in by_descriptor:
                    by_descriptor[descriptor].go_on()


if __name__ == "__main__":
    main()
