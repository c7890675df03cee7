"""Keeps the entries of daemons in the holder, and runs the guard of its mount; see `main`. Standard library only."""

from __future__ import annotations

import _thread
import os
import signal
import time

from kvfuse.holder.child import KEPT, MANY, Child, Thing, pack_things
from kvfuse.holder.store import Store

SWITCH = "fuse/switch"
"""entry whose descriptor aborts the connection"""
CONNECTION = "fuse/connection"
GUARD_SECONDS = 1.0
"""a guard that lived less is not restarted: the next would fail as soon"""


class Entries:
    """Named entries, oldest first."""

    is_apart = False
    """another process keeps the mount, in a container of its own"""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[bytes, list[int]]] = {}
        self._dropped: list[int] = []
        """descriptors to close"""

    @property
    def count(self) -> int:
        return len(self._kept)

    def get_content(self, name: str) -> bytes:
        """Get the content of an entry. b"": there is none."""
        return self._kept.get(name, (b"", []))[0]

    def get_descriptor(self, name: str) -> int | None:
        """Get the first descriptor of an entry, which stays this object's. None: there is none."""
        descriptors = self._kept.get(name, (b"", []))[1]
        return descriptors[0] if descriptors else None

    def keep(self, name: str, content: bytes, descriptors: list[int]) -> None:
        """Keep an entry, or replace that of the same name. The descriptors are this object's from here on."""
        self.drop(name)
        self._kept[name] = content, descriptors

    def drop(self, name: str) -> None:
        self._dropped += self._kept.pop(name, (b"", []))[1]
        try:
            while self._dropped:
                # The last close of the control socket waits until the kernel has written everything back, which the
                # daemon has to answer; and the close of large memory takes its time.
                _thread.start_new_thread(os.close, (self._dropped[-1],))
                self._dropped.pop()
        except RuntimeError:
            pass  # no thread can be started now: the next drop retries

    def drop_all(self) -> None:
        for name in list(self._kept):
            self.drop(name)

    def list_things(self) -> list[Thing]:
        """List all entries, oldest first. The descriptors stay this object's."""
        return [(name, content, descriptors) for name, (content, descriptors) in self._kept.items()]

    def send_all_to(self, child: Child) -> None:
        """Send a daemon all entries. OSError: it is dead, or its socket stays full."""
        if child.takes_many:
            for message, passed in pack_things(self.list_things()):
                child.send(MANY, "", message, passed)
        else:
            for thing in self.list_things():
                child.send(KEPT, *thing)

    def take_line(self) -> list[int]:
        """Take the descriptor that the next daemon gets with START: a line to the process that keeps the mount."""
        return []


class Things(Entries):
    """Entries of a holder's own, and the guard, which starts once the switch is kept."""

    def __init__(self, guard: list[str], point: str) -> None:
        super().__init__()
        self._point = point
        self._command = [*guard, str(os.getpid()), point]
        self._store = Store()
        self._kept = self._store.take_things()
        self.guard = 0
        self._guard_begun = 0.0

    def keep(self, name: str, content: bytes, descriptors: list[int]) -> None:
        super().keep(name, content, descriptors)
        if name == SWITCH and not self.guard:
            self._start_guard(descriptors[0])

    def abort_connection(self) -> None:
        """Abort the connection: waiting callers get an error."""
        if SWITCH in self._kept:
            os.write(self._kept[SWITCH][1][0], b"1")

    def _start_guard(self, switch: int) -> None:
        self._guard_begun = time.monotonic()
        try:
            self.guard = os.fork()
        except OSError as error:
            os.write(2, f"kvfuse: {self._point} has no guard: {error}\n".encode("utf-8", "backslashreplace"))
            return
        if self.guard == 0:
            try:
                os.setsid()
                os.dup2(switch, 1)
                nowhere = os.open(os.devnull, os.O_RDWR)
                os.dup2(nowhere, 0)
                os.dup2(nowhere, 2)
                os.closerange(3, 1 << 16)
                os.execv(self._command[0], self._command)
            finally:
                os._exit(127)

    def restart_guard(self) -> None:
        """Start another guard after one was killed and reaped."""
        self.guard = 0
        if SWITCH in self._kept and time.monotonic() - self._guard_begun > GUARD_SECONDS:
            self._start_guard(self._kept[SWITCH][1][0])

    def unmount(self) -> None:
        """Unmount, as no daemon did."""
        words = ["umount", "-i", "-l"] if os.geteuid() == 0 else ["fusermount3", "-u", "-z"]
        pid = os.fork()
        if pid == 0:
            try:
                os.execvp(words[0], [*words, self._point])
            finally:
                os._exit(127)
        os.waitpid(pid, 0)

    def close(self) -> None:
        """End the guard, and close all entries; store those with systemd that the service's next start may use."""
        if self.guard:
            os.kill(self.guard, signal.SIGKILL)
            os.waitpid(self.guard, 0)
        self._store.leave_things(self._kept)
        self.drop_all()
