"""The supervisor's side of `hold`: entries that a process in another container keeps. Standard library only.

The supervisor has a copy of all entries, which counts only while the other process is away: at each start of a daemon
it gets all entries from there, and once that process is back it gets them from here.
"""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import suppress

from kvfuse.holder.child import (
    COMPLETE,
    DEPOSIT,
    JOIN,
    MANY,
    REFUSED,
    TURN,
    YOURS,
    Child,
    pack_things,
    receive_message,
    send_message,
    unpack_things,
)
from kvfuse.holder.status_socket import find_device
from kvfuse.holder.things import Entries

PAUSE_SECONDS = 0.2
"""between tries to reach the process that keeps the mount"""
ANSWER_SECONDS = 5.0
"""timeout of its messages, but for the turn, which takes as long as another supervisor lives"""


class HeldThings(Entries):
    """Entries of the mount that the process behind the socket at ``path`` keeps."""

    is_apart = True
    guard = 0

    def __init__(self, path: str, point: str) -> None:
        super().__init__()
        self._path, self._point = path, point
        self._stream: socket.socket | None = None
        self._tried = 0.0
        self._line: list[int] = []
        self.device: str | None = None
        """of the mount whose entries these are; None: there are none yet"""
        self.is_whole = self.may_deposit = False
        """the other process has all entries; it has none, and takes these"""
        self.refusal = ""
        """why it refuses this supervisor"""

    def fileno(self) -> int:
        """-1: the other process is away."""
        return self._stream.fileno() if self._stream is not None else -1

    @property
    def is_connected(self) -> bool:
        return self._stream is not None

    def connect(self) -> bool:
        """Reach the other process, unless it was tried just now. True: it is reached, and knows what this one has."""
        if self._stream is not None or time.monotonic() < self._tried + PAUSE_SECONDS:
            return False
        self._tried = time.monotonic()
        stream = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stream.settimeout(ANSWER_SECONDS)
        try:
            stream.connect(self._path)
            said = {"entries": self.count, "device": self.device or ""}
            send_message(stream, JOIN, "", json.dumps(said).encode())
        except OSError:
            stream.close()
            return False
        self._stream = stream
        return True

    def read(self) -> bool:
        """Read a message. True: this supervisor has the turn and all entries, or shall `deposit` its own."""
        assert self._stream is not None
        try:
            message = receive_message(self._stream)
        except OSError:
            message = None
        if message is None:
            self.lose()
            return False
        kind, _, content, descriptors = message
        if kind == MANY:
            for thing in unpack_things(content, descriptors):
                self.keep(*thing)
            return False
        if kind in (YOURS, DEPOSIT):
            self._replace_line(descriptors)
            self.may_deposit = kind == DEPOSIT
            if kind == YOURS:
                self.device, self.is_whole = find_device(self._point), True
            return True
        for descriptor in descriptors:
            os.close(descriptor)
        if kind == REFUSED:
            self.refusal = content.decode("utf-8", "replace")
        return False

    def lose(self) -> None:
        """Note that the other process has ended."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        self.is_whole = self.may_deposit = False
        self._replace_line([])

    def refresh(self) -> None:
        """Get all entries anew, once a daemon is dead: it sent them there first."""
        if self._stream is None or not self.is_whole or self._line:
            return
        former, self._kept = self._kept, {}
        try:
            send_message(self._stream, TURN)
            while not self.read():
                if self._stream is None:
                    raise ConnectionResetError
        except OSError:
            self.lose()
            self.drop_all()
            self._kept = former
        else:
            fresh, self._kept = self._kept, former
            self.drop_all()
            self._kept = fresh

    def deposit(self) -> None:
        """Give all entries to a process that has none."""
        if self._stream is None or not self.may_deposit:
            return
        self.may_deposit = False
        try:
            for content, descriptors in pack_things(self.list_things()):
                send_message(self._stream, MANY, "", content, descriptors)
            send_message(self._stream, COMPLETE)
        except OSError:
            self.lose()
        else:
            self.is_whole = True

    def send_all_to(self, child: Child) -> None:
        if self.may_deposit:  # the daemon that was to switch to the new line is dead
            self.deposit()
            self._replace_line([])
        self.refresh()
        super().send_all_to(child)

    def take_line(self) -> list[int]:
        line, self._line = self._line, []
        return line

    def _replace_line(self, descriptors: list[int]) -> None:
        for descriptor in self._line:
            os.close(descriptor)
        self._line = descriptors

    # -- what another process does -----------------------------------------------------------------------

    def abort_connection(self) -> None:
        """Nothing: calls wait for the daemon of the next container."""

    def restart_guard(self) -> None:
        """Nothing: the mount outlives this process."""

    def unmount(self) -> None:
        """Nothing: the mount is the other process's."""

    def close(self) -> None:
        with suppress(OSError):
            if self._stream is not None:
                self._stream.close()
        self._replace_line([])
        self.drop_all()
