"""Daemons that start in a tenth of the usual processor time: as forks of one process that has imported what they need.

A thousand tests mount, and nearly all of what a start costs is Python importing the same modules again. The first
`ForkedDaemon` begins that process, which ends with the process of the tests. Commands that tests run themselves are
programs as users start them, and so are all daemons where KVFUSE_TEST_FORK is 0.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress

MODULES = (
    "kvfuse.cli.mount",
    "kvfuse.fs.mount_session",
    "kvfuse.metrics.server",
    "kvfuse.peer.service",
    "kvfuse.remote.records.etcd.store",
    "kvfuse.remote.records.lmdb.store",
    "kvfuse.remote.segments.block.store",
    "kvfuse.remote.segments.rados.store",
    "kvfuse.usrbio.daemon.listener",
)
"""that a daemon imports when it begins"""
MESSAGE_SIZE = 1 << 17
"""bytes of what a daemon is told: arguments and the environment"""
IS_ON = os.environ.get("KVFUSE_TEST_FORK", "1") != "0"


class ForkedDaemon:
    """``kvfuse`` with arguments. It has what tests use of `subprocess.Popen`; but once it ended it is no zombie."""

    def __init__(self, words: Sequence[str], log: int) -> None:
        """``log``: descriptor of what it says."""
        self.returncode: int | None = None
        self._ended, told = os.pipe()
        self._close = weakref.finalize(self, os.close, self._ended)
        try:
            self.pid = _nursery().fork(words, log, told)
        finally:
            os.close(told)

    def poll(self) -> int | None:
        return self._look(0)

    def wait(self, timeout: float | None = None) -> int:
        """TimeoutExpired."""
        ended = self._look(timeout)
        if ended is None:
            raise subprocess.TimeoutExpired("kvfuse", timeout or 0)
        return ended

    def _look(self, timeout: float | None) -> int | None:
        if self.returncode is None:
            poll = select.poll()
            poll.register(self._ended, select.POLLIN)
            if poll.poll(None if timeout is None else 1000 * timeout):
                self.returncode = int(os.read(self._ended, 100))
                self._close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it ended just now
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Nursery:
    """The process that daemons are forks of, as the tests see it."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())], cwd="/", pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )  # fmt: skip
        atexit.register(self._end)

    def fork(self, words: Sequence[str], log: int, told: int) -> int:
        """The number of a process that runs ``kvfuse`` with ``words``; how it ends is written to ``told``."""
        asked = {"words": list(words), "folder": os.getcwd(), "environment": dict(os.environ)}
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(asked).encode()], [log, told])
            return int(self._socket.recv(100))

    def _end(self) -> None:
        self._socket.close()
        self._process.wait()


_nurseries: dict[int, Nursery] = {}
"""of this process; one that is forked from it would need its own"""


def _nursery() -> Nursery:
    if os.getpid() not in _nurseries:
        _nurseries[os.getpid()] = Nursery()
    return _nurseries[os.getpid()]


# -- in that process ------------------------------------------------------------------------------------


def serve(asked: socket.socket) -> None:
    """Fork as often as tests ask. Returns in a child, which has become what was asked for."""
    children: dict[int, tuple[int, int]] = {}  # pidfd -> pid, and where to tell how it ended
    poll = select.poll()
    poll.register(asked, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor == asked.fileno():
                message, (log, told), _, _ = socket.recv_fds(asked, MESSAGE_SIZE, 2)
                pid = os.fork()
                if pid == 0:
                    asked.detach()
                    become(json.loads(message), log)
                    return
                pidfd = os.pidfd_open(pid)
                children[pidfd] = pid, told
                poll.register(pidfd, select.POLLIN)
                asked.send(b"%d" % pid)
                os.close(log)
            else:
                pid, told = children.pop(descriptor)
                poll.unregister(descriptor)
                with suppress(BrokenPipeError):  # nobody wants to know
                    os.write(told, b"%d" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                os.close(told)
                os.close(descriptor)


def become(asked: dict[str, list[str]], log: int) -> None:
    """A process that is as if it had just been started, with nothing of the one that it comes from."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, descriptor in enumerate((nothing, log, log)):
        os.dup2(descriptor, number)
    os.closerange(3, 1 << 20)
    os.chdir(str(asked["folder"]))
    os.environ.clear()
    os.environ.update(asked["environment"])
    sys.argv[1:] = asked["words"]
    import trio

    trio._core._run._r.seed()  # private: in which order tasks go on, which all forks would have alike


if __name__ == "__main__":
    for name in MODULES:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    try:
        serve(socket.socket(fileno=int(sys.argv[1])))
    except ValueError:  # no descriptors came: the tests are over
        os._exit(0)
    from kvfuse.cli import main

    main()
