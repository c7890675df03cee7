"""Starts daemons and exchanges messages with them, on the holder's side; see `main`. Standard library only.

    daemon                                     holder
    started, with one end of a socket pair ->
    HELLO {version, problem, forks, answers, standby, many} -> imports are done; ``problem``: with mount.conf
                                            <- KEPT name, content, descriptors (for each entry, oldest first)
                                            <- or MANY {entries} (if HELLO has ``many``: calls wait meanwhile)
                                            <- START {afresh: the mount.conf that was read counts, not the kept one;
                                                      deaths: of daemons of this mount, by cause}
    KEEP name, content, descriptors         ->  replaces the entry of that name
    DROP name                               ->
    READY (the mount answers)               ->
                                            <- LEAVE {seconds}
    LEFT (all is stored, requests wait)     ->  or STAYS why: the daemon cannot leave, and goes on
                                            <- ASK, each second, if HELLO has ``answers``
    ALIVE (its event loop runs)             ->  the holder kills a daemon that is silent for 10 s (`pulse`)
    DIED why (an error of its own)          ->  and its exit status: a death like any other
    END (the mount is gone, all is stored)  ->  and its exit status

A message is one datagram: a letter, a name, a zero byte, content. The holder reads all that a daemon sent before its
death. Messages may only be added, and unknown ones are ignored: after an upgrade the holder is of an older version.
HELLO says whether a daemon knows FORK (``forks``), and whether its mount.conf wants a ``standby``, from an upgrade on.

Messages of the standby:

    FORK, with one end of a socket pair     ->  to the standby
    BORN {pid}, with its pidfd              <-  on that socket, from a child of the holder, which continues after HELLO
    SPEAK, with a descriptor                ->  later output of the standby, and of daemons that it forks

Messages where a process in another container keeps the mount (`hold`, `held`); START then has the line's descriptor:

                                            <- LINE, with a descriptor: a new line to the one that keeps the mount
    SWITCHED (later entries go there, too)  ->
"""

from __future__ import annotations

import array
import json
import os
import select
import signal
import socket
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

from kvfuse.holder.pulse import Pulse
from kvfuse.holder.rights import check_program

MESSAGE_SIZE_MAX = 1 << 17
DESCRIPTORS_MAX = 64
HELLO, KEPT, START, KEEP, DROP, READY, END, LEAVE, LEFT, STAYS, FORK, BORN, SPEAK, ASK, ALIVE, DIED, MANY = (
    b"HKSPDREVLYFBOAIXM"
)
LINE, SWITCHED = b"NW"
JOIN, TURN, YOURS, DEPOSIT, COMPLETE, REFUSED, BIND = b"JTUQCZG"
"""kinds of messages that a supervisor, or a daemon, exchanges with `hold`"""
DIED_STATUS = 70
"""exit status of a daemon that ends for an error of its own (EX_SOFTWARE)"""
_ONE_OF_MANY = struct.Struct("<HIH")
"""before each entry of a MANY: bytes of its name and of its content, number of descriptors"""
MANY_SIZE, MANY_DESCRIPTORS = 64 << 10, 32
"""limits of a MANY, in bytes and descriptors"""
SKILLS = "forks", "many"
VARIABLE = "KVFUSE_HOLDER"
"""environment of the daemon: the descriptor of its end of the socket pair"""
ERRORS_VARIABLE = "KVFUSE_HOLDER_ERRORS"
"""environment of the daemon: the descriptor of its standard error while it serves"""
FORK_SECONDS = 5.0
"""timeout of BORN: some milliseconds are usual"""
SEND_SECONDS = 5.0
"""timeout of a send: a stopped daemon whose socket is full counts as dead then"""
try:
    IS_OWN_TABLE = os.readlink("/proc/self") == str(os.getpid())
except OSError:
    IS_OWN_TABLE = False
"""/proc is that of this process's pid namespace"""
CAUSES = "killed", "exception", "silent", "crash", "exit"
"""causes of death of a daemon that served, or was about to: SIGKILL by others, or by the kernel out of memory; an error
of its own; SIGKILL by the holder, as it did not answer; another signal; an exit status without a message"""
DEATH_SECONDS, END_SECONDS = 0.02, 10.0
"""timeouts from the end of the first thread to that of the last: after a death, and after an end by itself"""
WRITE_SECONDS = 3.0
"""the same, where a thread of a dead daemon is in a write, or runs: a late disk must not store that after what the next
daemon writes to the same place, and no request is to be read by who cannot answer it"""
WRITES = {"x86_64": (18, 296, 328), "aarch64": (68, 70, 287)}.get(os.uname().machine, ())
"""numbers of pwrite, pwritev and pwritev2. Other calls may wait for the next daemon's answer, as an invalidation of a
name in a folder that a caller has locked"""
SAID_SIZE_MAX = 2000
"""bytes at the end of stderr that are reported of a daemon that could not start"""


class Child:
    """A daemon process, or one that waits for its turn, such as a standby, which forks daemons (`fork`)."""

    def __init__(self, socket: socket.socket, pid: int, pidfd: int, said: int | None = None) -> None:
        """``said``: a file of its stderr before it serves, for `read_last_words`."""
        self.socket, self.pid, self.pidfd, self.said = socket, pid, pidfd, said
        self.begun = time.monotonic()
        self.has_said_hello = self.is_ready = self.has_ended = self.has_left = self.is_silent = False
        self.skills: frozenset[str] = frozenset()
        """extensions of the messages that it knows, by the words of its HELLO"""
        self.pulse = Pulse()
        self.standby: bool | None = None
        """``standby`` of its mount.conf, if HELLO has it"""
        self.version = self.problem = ""

    def fork(self) -> Child:
        """Fork a daemon, which continues after HELLO. TimeoutError: no answer; OSError: this process or the new one is
        dead, or no process can be started."""
        ours, theirs = make_socket_pair()
        try:
            with theirs:
                self.send(FORK, descriptors=[theirs.fileno()])
            ours.settimeout(FORK_SECONDS)
            data, descriptors = receive_datagram(ours)
            if not data:
                raise ConnectionResetError
            ours.settimeout(SEND_SECONDS)
        except BaseException:
            ours.close()
            raise
        said = None if self.said is None else os.dup(self.said)
        child = Child(ours, int(data[1:].partition(b"\0")[2]), descriptors[0], said)
        child.has_said_hello, child.version, child.problem = True, self.version, self.problem
        child.standby, child.pulse.answers = self.standby, self.pulse.answers
        child.skills = self.skills
        return child

    def redirect_output(self, descriptor: int) -> None:
        """Redirect its later standard output and errors, and those of its forks."""
        if self.may_fork:
            with suppress(OSError):
                self.send(SPEAK, descriptors=[descriptor])
            if self.said is not None:
                os.close(self.said)
                self.said = None

    def send(self, kind: int, name: str = "", content: bytes = b"", descriptors: Sequence[int] = ()) -> None:
        """Send a message. OSError: the process is dead; TimeoutError: its socket stays full."""
        send_message(self.socket, kind, name, content, descriptors)

    def receive(self) -> Message | None:
        """Receive its next message. None: its end is closed."""
        message = receive_message(self.socket)
        if message is not None and message[0] == ALIVE:
            self.pulse.note_answer()
        elif message is not None and message[0] == DIED:
            self.pulse.cause, self.pulse.reason = "exception", message[2].decode("utf-8", "replace")
        return message

    @property
    def may_fork(self) -> bool:
        return "forks" in self.skills

    @property
    def takes_many(self) -> bool:
        return "many" in self.skills

    def read_hello(self, content: bytes) -> None:
        said = json.loads(content)
        self.version, self.problem = str(said["version"]), str(said["problem"] or "")
        self.skills, self.standby = frozenset(word for word in SKILLS if said.get(word)), said.get("standby")
        self.pulse.answers = bool(said.get("answers"))
        self.has_said_hello = True

    def is_lost(self) -> bool:
        """Whether the serving daemon has not answered for too long. Called at each look, as it sends ASK."""
        if not self.pulse.answers or self.has_ended or self.has_left or self.pulse.cause:
            return False
        if self.pulse.is_due():
            with suppress(OSError):  # it is dead, or its socket is full: then it does not answer either
                self.send(ASK)
            self.pulse.note_question()
        return self.pulse.is_lost(self.pid, is_ready=self.is_ready)

    def kill(self, cause: str) -> None:
        """Kill the process, and note the cause of its death."""
        self.pulse.cause = cause
        os.kill(self.pid, signal.SIGKILL)

    def find_cause(self, code: int) -> str:
        """Find the cause of its death, one of ``CAUSES``. ``code``: as of `os.waitstatus_to_exitcode`."""
        if self.pulse.cause:
            return self.pulse.cause
        return "exit" if code >= 0 else "killed" if code == -signal.SIGKILL else "crash"

    def read_last_words(self) -> str:
        """Read the end of its stderr from before it served, if it was kept."""
        if self.said is None:
            return ""
        begin = max(0, os.fstat(self.said).st_size - SAID_SIZE_MAX)
        return os.pread(self.said, SAID_SIZE_MAX, begin).decode("utf-8", "replace").strip()

    def wait_for_last_thread(self) -> None:
        """Wait briefly for the end of its last thread, once the first one has ended."""
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        limit = time.monotonic() + WRITE_SECONDS
        while not poll.poll(1000 * (END_SECONDS if self.has_ended else DEATH_SECONDS)):
            if not is_acting(self.pid) or time.monotonic() > limit:
                break

    def kill_unneeded(self) -> int:
        """Kill a process that is not needed. Returns its pid, which the caller has to reap."""
        os.kill(self.pid, signal.SIGKILL)
        self.close()
        return self.pid

    def close(self) -> None:
        self.socket.close()
        os.close(self.pidfd)
        if self.said is not None:
            os.close(self.said)
            self.said = None


def spawn(command: list[str], folder: str, *, heard: bool = False, checked: bool = False) -> Child:
    """Start a process that imports all that a daemon needs, sends HELLO and waits. ``heard``: keep its stderr.

    ``checked``: the new process runs `check_program` first; in the holder a dead file system would block that.
    """
    said = os.memfd_create("kvfuse-errors") if heard else None
    ours, theirs = make_socket_pair()
    pid = os.fork()
    if pid == 0:
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            _inherit_nothing()
            os.set_inheritable(theirs.fileno(), True)
            os.environ[VARIABLE] = str(theirs.fileno())
            if said is not None:
                errors = os.dup(2)
                os.set_inheritable(errors, True)
                os.environ[ERRORS_VARIABLE] = str(errors)
                os.dup2(said, 2)
            if checked:
                check_program(command[0])
            os.chdir(folder if os.path.isdir(folder) else "/")
            os.execv(command[0], command)
        except BaseException as error:
            os.write(2, f"kvfuse: {command[0]}: {error}\n".encode("utf-8", "backslashreplace"))
        finally:
            os._exit(127)
    theirs.close()
    try:
        return Child(ours, pid, os.pidfd_open(pid), said)
    except OSError:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise


def _inherit_nothing() -> None:
    """Close on exec all but the standard streams, among them the pipe that reports the holder's start."""
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the listing's own descriptor
            os.set_inheritable(int(number), int(number) < 3)


def make_socket_pair() -> tuple[socket.socket, socket.socket]:
    """(end of the holder, end of a daemon)"""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MESSAGE_SIZE_MAX)
    ours.settimeout(SEND_SECONDS)
    return ours, theirs


Message = tuple[int, str, bytes, list[int]]
"""kind, name, content, descriptors"""


def send_message(
    end: socket.socket, kind: int, name: str = "", content: bytes = b"", descriptors: Sequence[int] = ()
) -> None:
    """Send a message. OSError: the peer is dead; TimeoutError: its socket stays full."""
    socket.send_fds(end, [bytes([kind]), name.encode(), b"\0", content], list(descriptors))


def receive_message(end: socket.socket) -> Message | None:
    """Receive the next message. None: the peer's end is closed. OSError: none has arrived in time."""
    try:
        data, descriptors = receive_datagram(end)
    except ConnectionResetError:
        return None
    if not data:
        return None
    name, _, content = data[1:].partition(b"\0")
    return data[0], name.decode(), content, descriptors


def receive_datagram(end: socket.socket) -> tuple[bytes, list[int]]:
    """Receive a datagram and its descriptors, closed on exec (`socket.recv_fds` of Python 3.11 takes no flags)."""
    descriptors = array.array("i")
    size = socket.CMSG_SPACE(DESCRIPTORS_MAX * descriptors.itemsize)
    data, ancillary, flags, _ = end.recvmsg(MESSAGE_SIZE_MAX, size, socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(content[: len(content) // descriptors.itemsize * descriptors.itemsize])
    if flags & socket.MSG_CTRUNC and data[:1] == bytes([KEEP]):  # no descriptor is free: half an entry is none
        for descriptor in descriptors:
            os.close(descriptor)
        return bytes([DROP]) + data[1:], []
    return data, descriptors.tolist()


Thing = tuple[str, bytes, list[int]]
"""name, content, descriptors"""


def pack_things(things: Iterable[Thing]) -> Iterator[tuple[bytes, list[int]]]:
    """Pack entries into messages MANY, in order: (content, descriptors) of each."""
    parts, size, passed = list[bytes](), 0, list[int]()
    for name, content, descriptors in things:
        if parts and (size + len(content) > MANY_SIZE or len(passed) + len(descriptors) > MANY_DESCRIPTORS):
            yield b"".join(parts), passed
            parts, size, passed = [], 0, []
        words = name.encode()
        parts += _ONE_OF_MANY.pack(len(words), len(content), len(descriptors)), words, content
        size += _ONE_OF_MANY.size + len(words) + len(content)
        passed = [*passed, *descriptors]
    if parts:
        yield b"".join(parts), passed


def unpack_things(content: bytes, descriptors: Sequence[int]) -> Iterator[Thing]:
    """Unpack the entries of a MANY."""
    at = passed = 0
    while at < len(content):
        name_size, size, count = _ONE_OF_MANY.unpack_from(content, at)
        at += _ONE_OF_MANY.size
        end = at + name_size
        yield content[at:end].decode(), content[end : end + size], list(descriptors[passed : passed + count])
        at, passed = end + size, passed + count


def is_dead(pid: int) -> bool:
    """Whether the first thread of a child has ended, or the kernel writes a core file of it.

    As `guard.is_dying`, which imports no module of ours. But a process without a /proc entry is dead here, as only the
    holder reaps its children. False where /proc is another pid namespace's: its numbers are those of others.
    """
    if not IS_OWN_TABLE:
        return False
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            lines = file.read().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:  # no descriptor or memory is free: unknown
        return False
    fields = dict(line.split(b":\t", 1) for line in lines if b":\t" in line)
    return fields.get(b"State", b"")[:1] in (b"Z", b"X") or fields.get(b"CoreDumping") == b"1"


def is_acting(pid: int) -> bool:
    """Whether a thread of a killed process is in one of `WRITES`, which no signal ends, or runs: it will end soon."""
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/syscall", "rb") as file:
                number = file.read().split()[0]
            if number == b"running" or (number.isdigit() and int(number) in WRITES):
                return True
    except OSError:  # the thread ended meanwhile, or has no such file
        pass
    return False
