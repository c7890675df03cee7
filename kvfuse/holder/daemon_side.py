"""Connects a daemon with the holder that started it (`main`): the keeper, forks of the standby, messages."""

from __future__ import annotations

import ctypes
import errno
import gc
import json
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import kvfuse
from kvfuse.errors import KvfuseError, MountError, innermost
from kvfuse.holder import child as holder_child
from kvfuse.holder import guard
from kvfuse.holder import main as holder
from kvfuse.holder import things as holder_things
from kvfuse.kept.keeper import Binder, Kept, check_sizes

if TYPE_CHECKING:
    import trio

KERNEL_RESENDS = 6, 9
"""the first Linux that resends requests which a daemon read and did not answer"""
NOT_SENT_AGAIN = "their callers wait until the mount ends; upgrades are not affected"
PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15
"""options of prctl(2)"""
STANDBY_NAME, DAEMON_NAME = "kvfuse-standby", "kvfuse-daemon"
"""process names in `ps`: of the standby, and of daemons that it forks"""
LOOK_SECONDS = 0.0002
"""between looks at whether a process has a new parent"""
SO_SNDBUFFORCE, SOCKET_SIZE = 32, 4 << 20
"""bytes of the send buffer: some thousands of messages"""
HOLDER_IS_DEAD = "the holder has died"
BIND_SECONDS, BOUND = 60.0, b"bound\n"
"""timeout of the binder: a far too busy machine needs ten seconds to start Python; what it says then"""
REASON_SIZE_MAX = 200
"""characters of the reason that DIED has"""

log = logging.getLogger(__name__)


class Holding:
    """The `Keeper` that the holder of this process provides. Made once; usable once `wait_for_turn` has returned.

    The socket buffers messages for a slow holder, which reads them even after the end of this process. Only what has
    no room there waits here, for a thread.
    """

    outlives = True
    is_apart: bool

    def __init__(self, descriptor: int, holder_pid: int | None = None) -> None:
        self._outbox = Outbox(_wrap_end(descriptor))
        self._line: Outbox | None = None
        """to the process that keeps the mount, if that is another one than the holder"""
        self._holder = os.getppid() if holder_pid is None else holder_pid
        self._left: dict[str, Kept] = {}
        self._names: dict[str, None] = {}
        """names of the former daemon's entries, taken or not"""
        self._is_sealed = False
        self.is_apart = False
        self.is_afresh = False
        """the mount.conf that this process read counts, not the former daemon's"""
        self.deaths: Mapping[str, int] = {}
        self._leave_seconds: float | None = None
        """timeout of a request to leave, until a task takes the request"""
        self._leave: trio.Event | None = None
        """set by the next request to leave"""

    @classmethod
    def from_environment(cls) -> Holding | None:
        """Make it of the environment. None: no holder started this process. From here on it ends with its holder."""
        descriptor = os.environ.pop(holder_child.VARIABLE, None)
        if descriptor is None:
            return None
        holding = cls(int(descriptor))
        holding._end_with_holder()
        return holding

    def _end_with_holder(self) -> None:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != self._holder:
            sys.exit(HOLDER_IS_DEAD)

    def wait_for_turn(self, problem: str = "", standby: bool | None = None) -> bool:
        """Send HELLO and wait until this daemon may start. False: a former daemon left its mount.

        ``problem``: with mount.conf; the holder refuses an upgrade then. ``standby``: of mount.conf, for an upgrade.
        A standby stays in this method, which returns in its forks: so the caller has one thread, and nothing that a
        fork could not use.
        """
        hello: dict[str, object] = {"version": kvfuse.__version__, "problem": problem, "standby": standby}
        hello |= dict.fromkeys(("forks", "answers", "many"), True)
        self._send(holder_child.HELLO, "", _encode_json(hello))
        while True:
            kind, name, content, descriptors = self._receive_message()
            if kind == holder_child.START:
                self._socket.setblocking(False)
                said = json.loads(content or b"{}")
                self.is_afresh, self.is_apart = bool(said.get("afresh")), bool(said.get("apart"))
                if descriptors:
                    self._line = Outbox(_wrap_end(descriptors[0]))
                    self._line.socket.setblocking(False)
                self.deaths = {str(cause): int(count) for cause, count in (said.get("deaths") or {}).items()}
                self._restore_stderr()
                # A connection without its first request is one that no daemon has served.
                left = self._left.get(holder_things.CONNECTION)
                return left is None or not left.content
            if kind == holder_child.FORK:
                self._fork_daemon(*descriptors)
            elif kind == holder_child.SPEAK:
                self._redirect_output(*descriptors)
            elif kind in (holder_child.KEPT, holder_child.MANY):
                is_one = kind == holder_child.KEPT
                things = [(name, content, descriptors)] if is_one else holder_child.unpack_things(content, descriptors)
                for thing, kept, passed in things:
                    self._left[thing] = Kept(kept, tuple(passed))
                    self._names[thing] = None
            else:
                for descriptor in descriptors:
                    os.close(descriptor)

    def _fork_daemon(self, descriptor: int) -> None:
        """Fork a daemon, with this end of its socket. Returns in the standby, and in the daemon.

        The daemon becomes the holder's child, as its own parent, a process in between, ends at once (`main`).
        """
        if not gc.get_freeze_count():
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # daemon and holder handle Ctrl-C
            _set_process_name(STANDBY_NAME)
        gc.freeze()  # a daemon's collector never visits these objects, so that most of their pages stay shared
        sys.stdout.flush()
        sys.stderr.flush()
        between = os.fork()
        if between:
            os.waitpid(between, 0)
            os.close(descriptor)
            return
        try:
            between = os.getpid()
            if os.fork():
                os._exit(0)
        except BaseException as error:
            os.write(2, f"kvfuse: a daemon cannot be forked: {error}\n".encode())
            os._exit(1)
        self._begin_as_daemon(descriptor, between)

    def _begin_as_daemon(self, descriptor: int, between: int) -> None:
        _set_process_name(DAEMON_NAME)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self._outbox.close()
        self._outbox = Outbox(_wrap_end(descriptor))
        reseed_random()
        given_up = time.monotonic() + holder_child.FORK_SECONDS
        while os.getppid() == between and time.monotonic() < given_up:
            time.sleep(LOOK_SECONDS)  # no event reports a new parent
        self._end_with_holder()
        pidfd = os.pidfd_open(os.getpid())
        self._send(holder_child.BORN, "", b"%d" % os.getpid(), [pidfd])
        os.close(pidfd)

    def _redirect_output(self, descriptor: int) -> None:
        """Redirect the standby's streams away from its starter's."""
        nothing = os.open(os.devnull, os.O_RDONLY)
        for opened, number in ((nothing, 0), (descriptor, 1), (descriptor, 2)):
            os.dup2(opened, number)
        os.close(nothing)
        os.close(descriptor)
        errors = os.environ.pop(holder_child.ERRORS_VARIABLE, None)
        if errors is not None:
            os.close(int(errors))

    def _receive_message(self) -> tuple[int, str, bytes, list[int]]:
        try:
            data, descriptors = holder_child.receive_datagram(self._socket)
        except ConnectionResetError:
            data = b""
        if not data:
            sys.exit(HOLDER_IS_DEAD)
        name, _, content = data[1:].partition(b"\0")
        return data[0], name.decode(), content, descriptors

    def _restore_stderr(self) -> None:
        """Restore stderr: an upgrade's answer does not quote later output."""
        errors = os.environ.pop(holder_child.ERRORS_VARIABLE, None)
        if errors is not None:
            sys.stderr.flush()
            os.dup2(int(errors), 2)
            os.close(int(errors))

    @property
    def _socket(self) -> socket.socket:
        return self._outbox.socket

    # -- Keeper ----------------------------------------------------------------------------------------

    def list_names(self, prefix: str) -> list[str]:
        return [name for name in self._names if name.startswith(prefix)]

    def take(self, name: str) -> Kept | None:
        return self._left.pop(name, None)

    def keep(self, name: str, content: bytes = b"", descriptors: Sequence[int] = ()) -> None:
        check_sizes(content, descriptors)
        self._close_left(name)
        self._keep_apart(holder_child.KEEP, name, content, descriptors)
        self._send(holder_child.KEEP, name, content, descriptors)

    def drop(self, name: str) -> None:
        if not self._is_sealed:
            self._close_left(name)
            self._keep_apart(holder_child.DROP, name)
            self._send(holder_child.DROP, name)

    def seal(self) -> None:
        self._is_sealed = True

    def _close_left(self, name: str) -> None:
        self._names.pop(name, None)
        left = self._left.pop(name, None)
        for descriptor in left.descriptors if left else ():
            os.close(descriptor)

    # -- messages to the holder ------------------------------------------------------------------------

    def report_ready(self) -> None:
        """Report that the mount answers."""
        self._send(holder_child.READY)

    def report_end(self, report: object = None) -> None:
        """Report that no next daemon is needed; ``report``: why the start failed."""
        self._send(holder_child.END, "", b"" if report is None else _encode_json(report) + b"\n")

    async def answer_holder(self) -> None:
        """Receive the holder's messages, and answer ASK, as the event loop runs. Until cancelled."""
        import trio

        while True:
            await trio.lowlevel.wait_readable(self._socket)
            kind, _, content, descriptors = self._receive_message()
            if kind == holder_child.LINE:
                self._switch_line(descriptors)
                continue
            for descriptor in descriptors:
                os.close(descriptor)
            if kind == holder_child.ASK:
                self._send(holder_child.ALIVE)
            elif kind == holder_child.LEAVE:
                self._leave_seconds = float(json.loads(content)["seconds"])
                if self._leave is not None:
                    self._leave.set()

    async def wait_until_asked(self) -> float:
        """Wait for a request to leave (`fs.leaving`). Returns its seconds. `answer_holder` has to run meanwhile."""
        import trio

        while self._leave_seconds is None:
            self._leave = trio.Event()
            await self._leave.wait()
        seconds, self._leave_seconds = self._leave_seconds, None
        return seconds

    def refuse_to_leave(self, why: str) -> None:
        """Report that this daemon cannot leave and continues."""
        self._send(holder_child.STAYS, "", why.encode("utf-8", "backslashreplace"))

    def report_left(self) -> None:
        """Report that all is stored and handed over. The holder then kills this process."""
        self._socket.setblocking(True)
        self._send(holder_child.LEFT)

    def _send(self, kind: int, name: str = "", content: bytes = b"", descriptors: Sequence[int] = ()) -> None:
        self._outbox.send(_pack_message(kind, name, content), descriptors)

    # -- the process that keeps the mount in another container ---------------------------------------------

    def _keep_apart(self, kind: int, name: str, content: bytes = b"", descriptors: Sequence[int] = ()) -> None:
        """Send an entry, or its end, to the process that keeps the mount, before the supervisor gets it."""
        if self._line is not None:
            self._line.send(_pack_message(kind, name, content), descriptors)

    def _switch_line(self, descriptors: Sequence[int]) -> None:
        """Use a new line, to the next process that keeps the mount; it gets former entries from the supervisor."""
        former, self._line = self._line, Outbox(_wrap_end(descriptors[0]))
        self._line.socket.setblocking(False)
        self._send(holder_child.SWITCHED)
        if former is not None:
            former.close()

    @property
    def binder(self) -> Binder | None:
        return self._bind_apart if self.is_apart else None

    def _bind_apart(self, listener: socket.socket, folder: Path, name: bytes) -> None:
        """Have the process that keeps the mount bind a socket in it: that takes rights that this one lacks."""
        reader, writer = os.pipe2(os.O_CLOEXEC)
        try:
            line = self._line
            if line is None:
                raise MountError(f"{folder}: no socket can be bound: the process that keeps the mount is away")
            content = os.fsencode(folder)
            line.send(_pack_message(holder_child.BIND, name.decode(), content), [listener.fileno(), writer])
            os.close(writer)
            writer = -1
            said = b""
            while select.select([reader], [], [], BIND_SECONDS)[0] and (part := os.read(reader, 1000)):
                said += part
            if said != BOUND:
                why = said.decode("utf-8", "replace").strip() or "the process that keeps the mount does not answer"
                raise MountError(f"{folder}: no socket can be bound: {why}")
        finally:
            os.close(reader)
            if writer >= 0:
                os.close(writer)


def _pack_message(kind: int, name: str, content: bytes) -> bytes:
    return bytes([kind]) + name.encode() + b"\0" + content


class Outbox:
    """Sends messages in order, without waiting: what has no room in the socket waits here, for a thread. Any thread."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self._waiting: deque[tuple[bytes, tuple[int, ...]]] = deque()
        self._is_passed_on = False
        """a thread sends what waits"""
        self._lock = threading.Lock()

    def close(self) -> None:
        with self._lock:
            while self._waiting:
                for descriptor in self._waiting.popleft()[1]:
                    os.close(descriptor)
            self.socket.close()

    def send(self, message: bytes, descriptors: Sequence[int] = ()) -> None:
        with self._lock:
            if self._waiting or not self._try_send(message, descriptors):
                self._waiting.append((message, tuple(map(os.dup, descriptors))))
                self._send_waiting()
            if self._waiting and not self._is_passed_on:
                with suppress(RuntimeError):  # no thread can be started: the next message tries again
                    threading.Thread(target=self._run_sender, name="kvfuse-holding", daemon=True).start()
                    self._is_passed_on = True

    def _run_sender(self) -> None:
        poll = select.poll()
        poll.register(self.socket, select.POLLOUT)
        while True:
            poll.poll()
            with self._lock:
                self._send_waiting()
                if not self._waiting:
                    self._is_passed_on = False
                    return
            time.sleep(LOOK_SECONDS)  # the socket may have room for bytes, and none for descriptors

    def _send_waiting(self) -> None:
        while self._waiting and self._try_send(*self._waiting[0]):
            for descriptor in self._waiting.popleft()[1]:
                os.close(descriptor)

    def _try_send(self, message: bytes, descriptors: Sequence[int]) -> bool:
        """Send a message without waiting. False: no room before the peer has read others."""
        try:
            socket.send_fds(self.socket, [message], list(descriptors))
        except BlockingIOError:
            return False
        except OSError as error:  # any other error: the holder is dead, and the kernel ends this process
            return error.errno != errno.ETOOMANYREFS
        return True


def end_daemon(holding: Holding, error: BaseException) -> NoReturn:
    """End this process at once, as `kill -9` does, for an error of its own: the next daemon takes over. Any thread."""
    reason = innermost(error)
    if isinstance(reason, SystemExit):  # the holder is dead: the kernel ends this process, too
        os._exit(1)
    holding._send(holder_child.DIED, "", repr(reason)[:REASON_SIZE_MAX].encode())
    try:
        unforeseen = None if isinstance(reason, KvfuseError) else error
        log.critical("the daemon ends, and the next one takes over: %s", reason, exc_info=unforeseen)
    finally:
        os._exit(holder_child.DIED_STATUS)


def _wrap_end(descriptor: int) -> socket.socket:
    """Wrap the daemon's end of the socket pair; its children do not inherit it."""
    end = socket.socket(fileno=descriptor)
    os.set_inheritable(descriptor, False)
    with suppress(PermissionError):
        end.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, SOCKET_SIZE)
    return end


def reseed_random() -> None:
    """Seed trio's random numbers, which order its tasks, so that forks differ. Python seeds its own."""
    with suppress(KeyError, AttributeError):
        sys.modules["trio._core._run"]._r.seed()  # private


def _set_process_name(name: str) -> None:
    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode())


def _encode_json(content: object) -> bytes:
    return json.dumps(content).encode()


def build_command(config: dict[str, Any]) -> list[str]:
    """Build the command that starts a holder; see `main.Holder` for ``config``."""
    config["guard"] = [sys.executable, "-I", "-S", guard.__file__]
    return [sys.executable, "-I", "-S", holder.__file__, json.dumps(config)]
