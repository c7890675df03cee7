"""What systemd does for a service with FileDescriptorStoreMax=, as far as a holder sees it."""

from __future__ import annotations

import array
import fcntl
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

START = """
import os, sys
count = int(sys.argv[1])
for number, descriptor in enumerate(map(int, sys.argv[2:2 + count])):
    os.dup2(descriptor, 3 + number)  # all of them are above
os.environ["LISTEN_PID"] = str(os.getpid())
command = sys.argv[2 + count:]
os.execvp(command[0], command)
"""
ABOVE = 1000


class ServiceManager:
    """One service. It takes messages in a thread of its own, from `running` on."""

    def __init__(self, folder: Path, *, keeps: bool = True) -> None:
        self.path = str(folder / "notify")
        self.keeps = keeps
        self.said: list[str] = []
        self.stored: list[tuple[str, int]] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.path)

    def start(self, command: Sequence[str], log: IO[bytes]) -> subprocess.Popen[bytes]:
        """With all that is stored; it goes on to be stored."""
        names = ":".join(name for name, _ in self.stored)
        above = [os.dup2(descriptor, ABOVE + number) for number, (_, descriptor) in enumerate(self.stored)]
        variables = {"NOTIFY_SOCKET": self.path, "FDSTORE": "1024", "LISTEN_FDS": str(len(above))}
        try:
            return subprocess.Popen(
                [sys.executable, "-c", START, str(len(above)), *map(str, above), *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=above,
                env={**os.environ, **variables, "LISTEN_FDNAMES": names},
            )
        finally:
            for descriptor in above:
                os.close(descriptor)

    @contextmanager
    def running(self) -> Iterator[None]:
        end, ended = os.pipe()
        thread = threading.Thread(target=self._run, args=(end,))
        thread.start()
        try:
            yield
        finally:
            os.close(ended)
            thread.join()
            os.close(end)
            self._socket.close()
            self.forget()

    def forget(self) -> None:
        """The service was stopped."""
        for _, descriptor in self.stored:
            os.close(descriptor)
        self.stored.clear()

    def _run(self, end: int) -> None:
        while True:
            ready, _, _ = select.select([self._socket, end], [], [])
            if end in ready:
                return
            descriptors = array.array("i")
            data, ancillary, _, _ = self._socket.recvmsg(8192, socket.CMSG_SPACE(4 * 16))
            for _, _, content in ancillary:
                descriptors.frombytes(content)
            self._take(dict(line.split("=", 1) for line in data.decode().splitlines()), list(descriptors))

    def _take(self, words: dict[str, str], descriptors: list[int]) -> None:
        self.said += [f"{name}={value}" for name, value in words.items()]
        if words.get("FDSTOREREMOVE") == "1":
            for name, descriptor in self.stored:
                if name == words["FDNAME"]:
                    os.close(descriptor)
            self.stored = [entry for entry in self.stored if entry[0] != words["FDNAME"]]
        elif words.get("FDSTORE") == "1" and self.keeps:
            for descriptor in descriptors:
                if not any(_is_same(descriptor, other) for _, other in self.stored):
                    self.stored.append((words["FDNAME"], descriptor))
                    continue
                os.close(descriptor)
            return
        for descriptor in descriptors:
            os.close(descriptor)


def _is_same(descriptor: int, other: int) -> bool:
    """As systemd judges where the kernel does not tell it: the same file, opened for the same."""
    flags = [fcntl.fcntl(each, fcntl.F_GETFL) for each in (descriptor, other)]
    return os.path.sameopenfile(descriptor, other) and flags[0] == flags[1]
