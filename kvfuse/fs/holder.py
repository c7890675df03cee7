"""Keeps a mount while daemons come and go: ``python holder.py CONFIG``, the process that a mount begins with.

It starts the daemon and keeps what that one gives it (`kvfuse/keeper.py`): the kernel's connection first of all, so
that requests wait where the daemon is gone, and do not fail. A daemon that died is followed by another, which finds all
of it.

    daemon                                     holder
    started, with one end of a socket pair ->
    HELLO (all is imported)                 ->
                                            <- KEPT name, content, descriptors (for each thing, oldest first)
                                            <- START
    KEEP name, content, descriptors         ->  what was kept under that name is replaced
    DROP name                               ->
    READY (the mount answers)               ->
    UPGRADE (how to start the next one)     ->
    END (the mount is gone, all is stored)  ->  and its exit status

A message is one datagram: a letter, a name, a zero byte, content. What a daemon sent before it was killed is read.

The daemon is ended by the kernel when the holder dies, and the guard (`guard`), which the holder has, ends the
connection: whoever waits gets an error. A daemon counts as dead when its first thread has ended: others of its threads
may wait in the kernel for an answer that only the next daemon can give.

Only the standard library is used, and little of it. Nothing here knows what a thing means, but for two names:
``fuse/switch``, whose descriptor ends the connection, and ``fuse/connection``.
"""

from __future__ import annotations

import _thread
import array
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence

MESSAGE_SIZE_MAX = 1 << 17
DESCRIPTORS_MAX = 64
HELLO, KEPT, START, KEEP, DROP, READY, UPGRADE, END = b"HKSPDRUE"
SWITCH = "fuse/switch"
CONNECTION = "fuse/connection"
VARIABLE = "KVFUSE_HOLDER"
"""of the daemon's environment: the descriptor of its end"""
LOOK_SECONDS = 0.2
"""between looks at a daemon: of a first thread that ended alone nothing tells"""
DEATH_SECONDS, END_SECONDS = 0.02, 10.0
"""from the end of the first thread to that of the last: of a daemon that died, and of one that ended by itself"""
PAUSES = (0.0, 0.0, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""seconds before a start, by how many daemons in a row have failed"""
FAILURES_MAX = 8
"""daemons in a row that fail by themselves: then the mount is given up"""
PROVEN_SECONDS = 10.0
"""a daemon that served so long did not fail for what it found"""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Child:
    """A daemon, or one that stands by to be the next."""

    def __init__(self, command: list[str], folder: str) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MESSAGE_SIZE_MAX)
        self.socket = ours
        self.begun = time.monotonic()
        self.has_said_hello = self.is_ready = self.has_ended = self.is_silent = False
        self.upgrade: bytes | None = None
        self.pid = os.fork()
        if self.pid == 0:
            try:
                signal.pthread_sigmask(signal.SIG_SETMASK, ())
                os.set_inheritable(theirs.fileno(), True)
                os.environ[VARIABLE] = str(theirs.fileno())
                os.chdir(folder if os.path.isdir(folder) else "/")
                os.execv(command[0], command)
            except BaseException as error:
                os.write(2, f"kvfuse: {command[0]}: {error}\n".encode())
            finally:
                os._exit(127)
        theirs.close()
        self.pidfd = os.pidfd_open(self.pid)

    def send(self, kind: int, name: str = "", content: bytes = b"", descriptors: Sequence[int] = ()) -> None:
        """OSError where it is gone."""
        socket.send_fds(self.socket, [bytes([kind]), name.encode(), b"\0", content], list(descriptors))

    def receive(self) -> tuple[int, str, bytes, list[int]] | None:
        """Its next message; None: it says nothing any more."""
        try:
            data, descriptors = receive(self.socket)
        except ConnectionResetError:
            return None
        if not data:
            return None
        name, _, content = data[1:].partition(b"\0")
        return data[0], name.decode(), content, descriptors

    def close(self) -> None:
        self.socket.close()
        os.close(self.pidfd)


def receive(end: socket.socket) -> tuple[bytes, list[int]]:
    """The next datagram and its descriptors, which no child gets (`socket.recv_fds` of Python 3.11 takes no flags)."""
    descriptors = array.array("i")
    size = socket.CMSG_SPACE(DESCRIPTORS_MAX * descriptors.itemsize)
    data, ancillary, _, _ = end.recvmsg(MESSAGE_SIZE_MAX, size, socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(content[: len(content) // descriptors.itemsize * descriptors.itemsize])
    return data, descriptors.tolist()


def is_dead(pid: int) -> bool:
    """The first thread of a process of ours has ended, or a core file is written of it."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            lines = file.read().splitlines()
    except OSError:
        return True
    fields = dict(line.split(b":\t", 1) for line in lines if b":\t" in line)
    return fields.get(b"State", b"")[:1] in (b"Z", b"X") or fields.get(b"CoreDumping") == b"1"


class Holder:
    """The loop. ``config``: ``command`` of a daemon and the ``folder`` it begins in, ``guard`` (command of the guard),
    ``point``, ``log`` (path or None), ``standby`` (bool), ``report`` (a descriptor for how the start went, or None)."""

    def __init__(self, config: dict[str, object]) -> None:
        self.config = config
        self.command: list[str] = list(config["command"])  # type: ignore[call-overload]
        self.kept: dict[str, tuple[bytes, list[int]]] = {}
        self.serving: Child | None = None
        self.standby: Child | None = None
        self.was_ready = False
        self.failures = 0
        self.guard = 0
        self.told_to_end: int | None = None
        self.status = 1
        self.dying: list[int] = []
        """processes whose last thread has not ended"""

    # -- what it says ----------------------------------------------------------------------------------

    def say(self, text: str) -> None:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        try:
            os.write(2, f"{stamp} {os.getpid()} WARNING holder: {self.config['point']}: {text}\n".encode())
        except OSError:
            pass

    def report(self, content: bytes) -> None:
        """How the start went, to whoever waits for it."""
        report = self.config.pop("report", None)
        if isinstance(report, int):
            try:
                os.write(report, content)
            except BrokenPipeError:
                pass
            os.close(report)

    def speak_to_log(self) -> None:
        """From the first daemon that is ready on: whoever waits for the end of this output gets it."""
        path = self.config.pop("log", None)
        if path:
            log = os.open(str(path), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.close(log)

    # -- things ----------------------------------------------------------------------------------------

    def keep(self, name: str, content: bytes, descriptors: list[int]) -> None:
        self.drop(name)
        self.kept[name] = content, descriptors
        if name == SWITCH and not self.guard:
            self.guard = os.fork()
            if self.guard == 0:
                try:
                    os.setsid()
                    os.dup2(descriptors[0], 1)
                    nowhere = os.open(os.devnull, os.O_RDWR)
                    os.dup2(nowhere, 0)
                    os.dup2(nowhere, 2)
                    os.closerange(3, 1 << 16)
                    command = [*map(str, self.config["guard"]), str(os.getppid()), str(self.config["point"])]  # type: ignore[call-overload]
                    os.execv(command[0], command)
                finally:
                    os._exit(127)

    def drop(self, name: str) -> None:
        for descriptor in self.kept.pop(name, (b"", []))[1]:
            # The last one of the control socket is closed when the kernel has written everything back, which the
            # daemon has to answer; and large memory takes its time.
            _thread.start_new_thread(os.close, (descriptor,))

    # -- daemons ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """Let the next daemon serve: the one that stands by, or a new one."""
        child, self.standby = self.standby or Child(self.command, str(self.config["folder"])), None
        self.serving = child
        if child.has_said_hello:
            self.hand_over(child)

    def hand_over(self, child: Child) -> None:
        """Give a daemon all that is kept, and have it begin."""
        try:
            for name, (content, descriptors) in list(self.kept.items()):
                child.send(KEPT, name, content, descriptors)
            child.send(START)
            child.begun = time.monotonic()
        except OSError:
            pass  # it is dead, which is seen elsewhere

    def read(self, child: Child) -> bool:
        """One message of a daemon. False: there is none."""
        message = child.receive()
        if message is None:
            return False
        kind, name, content, descriptors = message
        if kind == HELLO:
            child.has_said_hello = True
            if child is self.serving:
                self.hand_over(child)
        elif kind == KEEP and child is self.serving:
            self.keep(name, content, descriptors)
            return True
        elif kind == DROP and child is self.serving:
            self.drop(name)
        elif kind == READY:
            child.is_ready = self.was_ready = True
            self.report(b"{}\n")
            self.speak_to_log()
            if self.config.get("standby") and self.standby is None and child is self.serving:
                self.standby = Child(self.command, str(self.config["folder"]))
        elif kind == UPGRADE:
            child.upgrade = content
        elif kind == END:
            child.has_ended = True
            self.report(content or b"{}\n")
        for descriptor in descriptors:
            os.close(descriptor)
        return True

    def ended(self, child: Child) -> None:
        """A daemon is dead: all that it said is read, then another one begins, or the mount is over."""
        child.socket.setblocking(False)
        try:
            while self.read(child):
                pass
        except BlockingIOError:
            pass
        poll = select.poll()
        poll.register(child.pidfd, select.POLLIN)
        poll.poll(1000 * (END_SECONDS if child.has_ended else DEATH_SECONDS))
        pid, status = os.waitpid(child.pid, os.WNOHANG)
        code = os.waitstatus_to_exitcode(status) if pid else -signal.SIGKILL
        if not pid:
            self.dying.append(child.pid)
        child.close()
        if child is self.standby:
            self.standby = None
            return
        self.serving = None
        if child.has_ended or not self.was_ready or self.told_to_end is not None:
            if self.was_ready and not child.has_ended:
                self.unmount()
            self.finish(code if code >= 0 else 128 - code)
            return
        lived = time.monotonic() - child.begun
        was_killed = code == -signal.SIGKILL
        if child.is_ready and (was_killed or lived > PROVEN_SECONDS):
            self.failures = 0
        else:
            self.failures += 1
        how = f"exit status {code}" if code >= 0 else signal.Signals(-code).name
        if self.failures > FAILURES_MAX:
            self.say(f"{self.failures} daemons in a row have failed, the last with {how}: the mount is given up")
            self.give_up()
            self.finish(1)
            return
        pause = PAUSES[min(self.failures, len(PAUSES) - 1)]
        self.say(
            f"the daemon {child.pid} is dead ({how}): another one takes over" + (f" in {pause:g} s" if pause else "")
        )
        if pause:
            time.sleep(pause)
        self.start()

    def give_up(self) -> None:
        """End the connection: whoever waits gets an error."""
        if SWITCH in self.kept:
            os.write(self.kept[SWITCH][1][0], b"1")

    def unmount(self) -> None:
        """Take the mount away that no daemon took away."""
        words = ["umount", "-i", "-l"] if os.geteuid() == 0 else ["fusermount3", "-u", "-z"]
        pid = os.fork()
        if pid == 0:
            try:
                os.execvp(words[0], [*words, str(self.config["point"])])
            finally:
                os._exit(127)
        os.waitpid(pid, 0)

    def finish(self, status: int) -> None:
        """The mount is over."""
        self.status = status
        self.serving = None
        self.config["standby"] = False
        if self.standby is not None:
            os.kill(self.standby.pid, signal.SIGKILL)
            os.waitpid(self.standby.pid, 0)
            self.standby.close()
            self.standby = None
        if self.guard:
            os.kill(self.guard, signal.SIGKILL)
            os.waitpid(self.guard, 0)
        for name in list(self.kept):
            self.drop(name)
        self.report(b"")

    def signalled(self, number: int) -> None:
        """Somebody wants the mount to end: the daemon sees to it."""
        self.told_to_end = number
        if self.serving is not None:
            os.kill(self.serving.pid, signal.SIGTERM)

    # -- the loop --------------------------------------------------------------------------------------

    def run(self) -> int:
        """Until the mount is over; returns the exit status."""
        signal.pthread_sigmask(signal.SIG_BLOCK, {*STOP_SIGNALS, signal.SIGCHLD})
        wake, woken = socket.socketpair()
        for end in (wake, woken):
            end.setblocking(False)
        signal.set_wakeup_fd(woken.fileno())
        for number in (*STOP_SIGNALS, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {*STOP_SIGNALS, signal.SIGCHLD})
        self.start()
        while self.serving is not None:
            self.dying = [pid for pid in self.dying if os.waitpid(pid, os.WNOHANG)[0] == 0]
            children = [child for child in (self.serving, self.standby) if child is not None]
            poll = select.poll()
            poll.register(wake, select.POLLIN)
            for child in children:
                if not child.is_silent:
                    poll.register(child.socket, select.POLLIN)
                poll.register(child.pidfd, select.POLLIN)
            ready = {descriptor for descriptor, _ in poll.poll(1000 * LOOK_SECONDS)}
            if wake.fileno() in ready:
                for caught in wake.recv(100):
                    if caught in STOP_SIGNALS:
                        self.signalled(caught)
            for child in children:
                if child is not self.serving and child is not self.standby:
                    continue  # it ended with another one
                if child.socket.fileno() in ready:
                    if self.read(child):
                        continue
                    child.is_silent = True
                if child.pidfd in ready or is_dead(child.pid):
                    self.ended(child)
        return self.status


def main() -> None:
    os.chdir("/")
    with open("/proc/self/comm", "w") as comm:
        comm.write("kvfuse-holder")
    sys.exit(Holder(json.loads(sys.argv[1])).run())


if __name__ == "__main__":
    main()
