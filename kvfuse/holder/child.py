"""A daemon, as its holder has it, and the messages between the two; see `main`. Standard library only.

    daemon                                     holder
    started, with one end of a socket pair ->
    HELLO {version, problem, forks, standby, many} -> all is imported; ``problem``: with mount.conf
                                            <- KEPT name, content, descriptors (for each thing, oldest first)
                                            <- or MANY {things} (to one that says ``many``: calls wait meanwhile)
                                            <- START {afresh: what was read of mount.conf counts, not what is kept;
                                                      deaths: of daemons of this mount, by cause}
    KEEP name, content, descriptors         ->  what was kept under that name is replaced
    DROP name                               ->
    READY (the mount answers)               ->
                                            <- LEAVE {seconds}
    LEFT (all is stored, requests wait)     ->  or STAYS why: it goes on as if nothing had been
                                            <- ASK, each second, once its HELLO said that it answers
    ALIVE (its event loop runs)             ->  one that does not say so for 10 s is killed (`pulse`)
    DIED why (an error of its own)          ->  and its exit status: a death like any other
    END (the mount is gone, all is stored)  ->  and its exit status

A message is one datagram: a letter, a name, a zero byte, content. What a daemon sent before it was killed is read.
Messages may only be added to, and unknown ones are ignored: after an upgrade the holder is of an older version. That a
daemon knows FORK its HELLO says, and whether its mount.conf has one stand by, which counts from an upgrade on.

Of one that stands by:

    FORK, with one end of a socket pair     ->  to the one that stands by
    BORN {pid}, with its pidfd              <-  by that socket, from a child of the holder, which goes on as after HELLO
    SPEAK, with a descriptor                ->  where the one that stands by, and its daemons, write to from then on
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
from typing import TYPE_CHECKING

if TYPE_CHECKING or __name__.startswith("kvfuse."):
    from kvfuse.holder.pulse import Pulse
    from kvfuse.holder.rights import check_program
else:
    from pulse import Pulse
    from rights import check_program

MESSAGE_SIZE_MAX = 1 << 17
DESCRIPTORS_MAX = 64
HELLO, KEPT, START, KEEP, DROP, READY, END, LEAVE, LEFT, STAYS, FORK, BORN, SPEAK, ASK, ALIVE, DIED, MANY = (
    b"HKSPDREVLYFBOAIXM"
)
DIED_STATUS = 70
"""exit status of a daemon that ends for an error of its own (EX_SOFTWARE)"""
_ONE_OF_MANY = struct.Struct("<HIH")
"""before each thing of a MANY: bytes of its name and of its content, how many descriptors"""
MANY_SIZE, MANY_DESCRIPTORS = 64 << 10, 32
"""a MANY with so much is full"""
SKILLS = "forks", "many"
VARIABLE = "KVFUSE_HOLDER"
"""of the daemon's environment: the descriptor of its end"""
ERRORS_VARIABLE = "KVFUSE_HOLDER_ERRORS"
"""and of what is to be its standard error when it serves"""
FORK_SECONDS = 5.0
"""that a copy may take to say that it is there: some milliseconds are usual"""
SEND_SECONDS = 5.0
"""for which a daemon that is stopped may take no message: then it is no better than a dead one"""
try:
    IS_OWN_TABLE = os.readlink("/proc/self") == str(os.getpid())
except OSError:
    IS_OWN_TABLE = False
"""/proc has the processes of this place, by the numbers that they have here"""
CAUSES = "killed", "exception", "silent", "crash", "exit"
"""of the death of a daemon that served, or was about to: SIGKILL of others, or for want of memory; an error of its own;
the holder's SIGKILL, as it did not answer; another signal; an exit status without a word"""
DEATH_SECONDS, END_SECONDS = 0.02, 10.0
"""from the end of the first thread to that of the last: of a daemon that died, and of one that ended by itself"""
WRITE_SECONDS = 3.0
"""the same, where one that died is in a write: to a disk that is late it may not come after what the next daemon writes
to the same place"""
WRITES = {"x86_64": (18, 296, 328), "aarch64": (68, 70, 287)}.get(os.uname().machine, ())
"""numbers of pwrite, pwritev and pwritev2. Other calls may wait for the next daemon's answer, as of a thread that tells
the kernel of a name in a folder that somebody has locked"""
SAID_SIZE_MAX = 2000
"""bytes of the last words of a daemon that could not begin"""


class Child:
    """A daemon, or one that waits for its turn: that one may go on waiting, and daemons be copies of it (`fork`)."""

    def __init__(self, socket: socket.socket, pid: int, pidfd: int, said: int | None = None) -> None:
        """``said``: a file of what it said on standard error before it served, for `last_words`."""
        self.socket, self.pid, self.pidfd, self.said = socket, pid, pidfd, said
        self.begun = time.monotonic()
        self.has_said_hello = self.is_ready = self.has_ended = self.has_left = self.is_silent = False
        self.skills: frozenset[str] = frozenset()
        """what it knows of later versions of the messages, by the words of its HELLO"""
        self.pulse = Pulse()
        self.standby: bool | None = None
        """what its mount.conf says of one that stands by, if it says so"""
        self.version = self.problem = ""

    def fork(self) -> Child:
        """A daemon that is as if it had waited, too. TimeoutError: there is no answer; OSError: this one is dead, or
        the new one, or there can be no more processes."""
        ours, theirs = _make_socket_pair()
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
        """Where its standard output and errors, and those of its copies, go from now on."""
        if self.may_fork:
            with suppress(OSError):
                self.send(SPEAK, descriptors=[descriptor])
            if self.said is not None:
                os.close(self.said)
                self.said = None

    def send(self, kind: int, name: str = "", content: bytes = b"", descriptors: Sequence[int] = ()) -> None:
        """OSError where it is gone; TimeoutError where it takes nothing."""
        socket.send_fds(self.socket, [bytes([kind]), name.encode(), b"\0", content], list(descriptors))

    def receive(self) -> tuple[int, str, bytes, list[int]] | None:
        """Its next message; None: it says nothing any more."""
        try:
            data, descriptors = receive_datagram(self.socket)
        except ConnectionResetError:
            return None
        if not data:
            return None
        name, _, content = data[1:].partition(b"\0")
        if data[0] == ALIVE:
            self.pulse.note_answer()
        elif data[0] == DIED:
            self.pulse.cause, self.pulse.reason = "exception", content.decode("utf-8", "replace")
        return data[0], name.decode(), content, descriptors

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
        """Whose turn it is has not answered for too long; to be called at each look, as it asks."""
        if not self.pulse.answers or self.has_ended or self.has_left or self.pulse.cause:
            return False
        if self.pulse.is_due():
            with suppress(OSError):  # it is dead, or takes nothing: then it does not answer either
                self.send(ASK)
            self.pulse.note_question()
        return self.pulse.is_lost(self.pid, is_ready=self.is_ready)

    def kill(self, cause: str) -> None:
        """It does not do what it is to do."""
        self.pulse.cause = cause
        os.kill(self.pid, signal.SIGKILL)

    def find_cause(self, code: int) -> str:
        """One of ``CAUSES``. ``code``: as of `os.waitstatus_to_exitcode`."""
        if self.pulse.cause:
            return self.pulse.cause
        return "exit" if code >= 0 else "killed" if code == -signal.SIGKILL else "crash"

    def read_last_words(self) -> str:
        """What it said when it could not begin, if that is known."""
        if self.said is None:
            return ""
        begin = max(0, os.fstat(self.said).st_size - SAID_SIZE_MAX)
        return os.pread(self.said, SAID_SIZE_MAX, begin).decode("utf-8", "replace").strip()

    def wait_for_last_thread(self) -> None:
        """For its last thread, when the first one has ended; not for long."""
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        limit = time.monotonic() + WRITE_SECONDS
        while not poll.poll(1000 * (END_SECONDS if self.has_ended else DEATH_SECONDS)):
            if not is_writing(self.pid) or time.monotonic() > limit:
                break

    def kill_unneeded(self) -> int:
        """It is not needed: kill it. Its pid, to be waited for."""
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
    """A process of its own that imports all that a daemon needs, says hello and waits. ``heard``: see `Child`.

    ``checked``: only if nobody else can change the program. That process looks, as a file system may not answer.
    """
    said = os.memfd_create("kvfuse-errors") if heard else None
    ours, theirs = _make_socket_pair()
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
    """But the standard streams: not what the holder has of its starter, as the pipe that says how the start went."""
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the listing
            os.set_inheritable(int(number), int(number) < 3)


def _make_socket_pair() -> tuple[socket.socket, socket.socket]:
    """Of the holder, and of a daemon."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MESSAGE_SIZE_MAX)
    ours.settimeout(SEND_SECONDS)
    return ours, theirs


def receive_datagram(end: socket.socket) -> tuple[bytes, list[int]]:
    """The next datagram and its descriptors, which no child gets (`socket.recv_fds` of Python 3.11 takes no flags)."""
    descriptors = array.array("i")
    size = socket.CMSG_SPACE(DESCRIPTORS_MAX * descriptors.itemsize)
    data, ancillary, flags, _ = end.recvmsg(MESSAGE_SIZE_MAX, size, socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(content[: len(content) // descriptors.itemsize * descriptors.itemsize])
    if flags & socket.MSG_CTRUNC and data[:1] == bytes([KEEP]):  # no descriptor is free: half a thing is none
        for descriptor in descriptors:
            os.close(descriptor)
        return bytes([DROP]) + data[1:], []
    return data, descriptors.tolist()


Thing = tuple[str, bytes, list[int]]
"""name, content, descriptors"""


def pack_things(things: Iterable[Thing]) -> Iterator[tuple[bytes, list[int]]]:
    """(content, descriptors) of messages MANY with all of these things, in that order."""
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
    """The things of a MANY."""
    at = passed = 0
    while at < len(content):
        name_size, size, count = _ONE_OF_MANY.unpack_from(content, at)
        at += _ONE_OF_MANY.size
        end = at + name_size
        yield content[at:end].decode(), content[end : end + size], list(descriptors[passed : passed + count])
        at, passed = end + size, passed + count


def is_dead(pid: int) -> bool:
    """The first thread of a process of ours has ended, or a core file is written of it.

    As `guard` has it, which imports nothing of ours. But what is not in the table is dead here: the holder is the one
    who takes its children out. False where the table is that of another place, and these are numbers of others.
    """
    if not IS_OWN_TABLE:
        return False
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            lines = file.read().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:  # no descriptor or memory is free: nothing is known
        return False
    fields = dict(line.split(b":\t", 1) for line in lines if b":\t" in line)
    return fields.get(b"State", b"")[:1] in (b"Z", b"X") or fields.get(b"CoreDumping") == b"1"


def is_writing(pid: int) -> bool:
    """A thread of a process that was killed is in one of `WRITES`, which no signal ends."""
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/syscall", "rb") as file:
                number = file.read().split()[0]
            if number.isdigit() and int(number) in WRITES:
                return True
    except OSError:  # it ended meanwhile, or has no such file
        pass
    return False
