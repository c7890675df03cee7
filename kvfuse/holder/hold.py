"""Keeps a mount whose daemons run in another container: ``python hold.py CONFIG``, the program of `kvfuse hold`.

`kvfuse hold` mounts, and becomes this process, which keeps the kernel's connection and all other entries of the daemon
(`kept.keeper`). `kvfuse serve` runs in another container, finds this process by a socket in a folder that both share,
and starts daemons: its supervisor (`main`) speaks with this process by `held`. Either may be killed or replaced:

* The container of `serve` ends: the next supervisor gets all entries from here. Meanwhile calls wait.
* This process ends: supervisor and daemon have all entries, too, and the mount stays. The next process finds a living
  mount, does not mount, and gets all entries from the supervisor.
* Both end at once: nobody has the connection; callers get an error, and the next process mounts anew.

One supervisor at a time has the *turn*; others wait for it, as in a second container that stands by. Each daemon has a
*line* to this process, a socket pair on which it sends KEEP and DROP itself: what it kept is here even if its whole
container is killed a moment later.

    supervisor                              this process
    JOIN {entries, device, version}         ->  ``entries`` 0: it waits for its turn
                                            <- MANY {entries} ..., YOURS with a line: it has the turn
    TURN (its daemon is dead)               ->  the same answer: entries here are those that count
                                            <- DEPOSIT with a line, if it has the entries of this mount, and this none
    MANY {entries} ..., COMPLETE            ->
                                            <- REFUSED why

    daemon, on its line
    KEEP name, content, descriptors         ->
    DROP name                               ->
    BIND name, FOLDER, with a socket and the end of a pipe -> `binder` binds the socket, and says "bound" or why not

Messages are those of `child`. The supervisor's end counts as soon as its socket is closed; then its daemon's, once the
line is closed, or ``DEATH_SECONDS`` later. Standard library only.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from typing import Any

if __name__ == "__main__":  # without site-packages
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(__file__))))
from kvfuse.holder.child import (
    BIND,
    COMPLETE,
    DEPOSIT,
    DROP,
    JOIN,
    KEEP,
    MANY,
    REFUSED,
    TURN,
    YOURS,
    Message,
    make_socket_pair,
    pack_things,
    receive_message,
    send_message,
    unpack_things,
)
from kvfuse.holder.rights import get_peer
from kvfuse.holder.signals import STOP_SIGNALS, take_signals
from kvfuse.holder.status_socket import find_device, listen_at
from kvfuse.holder.things import CONNECTION, SWITCH, Entries

LOOK_SECONDS = 0.2
DEATH_SECONDS = 3.0
"""timeout from the supervisor's end to that of its daemon: a thread of it may be in a write to the disk (`child`)"""
ADOPT_SECONDS = 30.0
"""timeout of a deposit, where a living mount was found: supervisors look for this process several times a second"""
STAYS_SECONDS = 3.0
"""after SIGTERM, until a supervisor that is still there is one that stays: both are told to end where all is removed"""
SO_SNDBUFFORCE, LINE_SIZE = 32, 4 << 20
"""bytes of a line's send buffer: some thousands of messages"""
PIPE_MESSAGES_MAX = 100
"""messages that are read of one peer in a row"""


class Supervisor:
    """A connection of `kvfuse serve`."""

    def __init__(self, stream: socket.socket) -> None:
        self.stream = stream
        self.pid, self.uid = get_peer(stream)
        self.name = f"process {self.pid}" if self.pid else "a process of another container"

    def send(self, kind: int, content: bytes = b"", descriptors: list[int] | None = None) -> None:
        """Send a message. OSError: it has ended, or reads nothing."""
        send_message(self.stream, kind, "", content, descriptors or [])


class Hold:
    """The loop. ``config``: ``point``; ``socket``, a path; ``device``, MAJOR:MINOR; ``things``, name -> (content,
    descriptors) of a mount that was made now, {}: a living mount was found; ``wait`` and ``grace``, seconds;
    ``binder``, a command; ``lock``, a descriptor that is only held."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.entries = Entries()
        for name, (content, descriptors) in config["things"].items():
            self.entries.keep(name, content.encode(), descriptors)
        self.is_adopting = not config["things"]
        self.owner: Supervisor | None = None
        """has the turn"""
        self.waiting: list[Supervisor] = []
        self.line: socket.socket | None = None
        self.staged: Entries | None = None
        """entries of a deposit that is not complete"""
        self.alone_since = time.monotonic()
        """when the last supervisor lost the turn"""
        self.told_to_end = 0.0
        """when; 0: not yet"""
        self.binders: set[int] = set()
        self.listener = listen_at(config["socket"])

    def say(self, text: str) -> None:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        line = repr(f"{stamp} {os.getpid()} hold: {self.config['point']}: {text}")  # safe for terminals
        with suppress(OSError):
            os.write(2, line[1:-1].encode() + b"\n")

    # -- supervisors -----------------------------------------------------------------------------------

    def accept_supervisor(self) -> None:
        try:
            stream, _ = self.listener.accept()
        except OSError:
            return
        stream.settimeout(5.0)
        peer = Supervisor(stream)
        try:
            message = receive_message(stream)
            if message is None or message[0] != JOIN:
                raise ValueError("its first message is not JOIN")
            said = json.loads(message[2])
            entries, device = int(said["entries"]), str(said["device"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            self.say(f"{peer.name} is refused: {error}")
            stream.close()
            return
        if peer.uid not in (0, os.geteuid()):
            self.refuse(peer, "only root, and the user who mounted, may serve the mount")
        elif not entries:
            self.waiting.append(peer)
        elif not self.is_adopting or self.owner is not None:
            self.refuse(peer, "another supervisor serves the mount, or it was mounted anew")
        elif device != self.config["device"]:
            self.refuse(peer, f"this is mount {self.config['device']}, and its entries are of mount {device}")
        else:
            self.begin_deposit(peer)

    def refuse(self, peer: Supervisor, why: str) -> None:
        self.say(f"{peer.name} is refused: {why}")
        with suppress(OSError):
            peer.send(REFUSED, why.encode())
        peer.stream.close()

    def begin_deposit(self, peer: Supervisor) -> None:
        self.owner, self.staged = peer, Entries()
        self.send_line(DEPOSIT)

    def read_supervisor(self, peer: Supervisor) -> None:
        """Read a message of a supervisor, or its end."""
        try:
            message = receive_message(peer.stream)
        except TimeoutError:
            return
        except OSError:
            message = None
        if message is None:
            self.note_end(peer)
            return
        kind, _, content, descriptors = message
        if peer is self.owner and kind == MANY and self.staged is not None:
            for thing in unpack_things(content, descriptors):
                self.staged.keep(*thing)
            return
        for descriptor in descriptors:
            os.close(descriptor)
        if peer is self.owner and kind == COMPLETE and self.staged is not None:
            self.entries, self.staged, self.is_adopting = self.staged, None, False
            self.say(f"{peer.name} goes on, with {self.entries.count} entries")
        elif peer is self.owner and kind == TURN and self.staged is None:
            self.read_line()
            self.close_line()
            self.give_turn(peer)

    def note_end(self, peer: Supervisor) -> None:
        """Note that a supervisor's process has ended."""
        peer.stream.close()
        if peer in self.waiting:
            self.waiting.remove(peer)
        if peer is not self.owner:
            return
        self.say(f"{peer.name}, which served it, has ended: calls wait")
        self.owner, self.alone_since = None, time.monotonic()
        if self.staged is not None:
            self.staged.drop_all()
            self.staged = None
            self.close_line()

    def pass_turn(self) -> None:
        """Give the turn to the supervisor that waits longest, once the former daemon is dead."""
        if self.owner is not None or self.is_adopting or not self.waiting:
            return
        if self.line is not None and time.monotonic() < self.alone_since + DEATH_SECONDS:
            return  # that daemon may still write
        self.close_line()
        self.owner = self.waiting.pop(0)
        self.give_turn(self.owner)

    def give_turn(self, peer: Supervisor) -> None:
        """Send a supervisor all entries, and a line for its daemon."""
        try:
            for content, descriptors in pack_things(self.entries.list_things()):
                peer.send(MANY, content, descriptors)
        except OSError as error:
            self.say(f"{peer.name} takes no entries: {error}")
            self.note_end(peer)
            return
        self.send_line(YOURS)

    def send_line(self, kind: int) -> None:
        assert self.owner is not None
        self.line, theirs = make_socket_pair()
        for end in (self.line, theirs):
            with suppress(PermissionError):
                end.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, LINE_SIZE)
        self.line.setblocking(False)
        try:
            self.owner.send(kind, b"", [theirs.fileno()])
        except OSError as error:
            self.say(f"{self.owner.name} reads nothing: {error}")
            self.note_end(self.owner)
        finally:
            theirs.close()

    # -- the daemon's line -----------------------------------------------------------------------------

    def read_line(self) -> None:
        """Read what the daemon has sent; close the line at its end."""
        while self.line is not None:
            try:
                message = receive_message(self.line)
            except BlockingIOError:
                return
            except OSError:
                message = None
            if message is None:
                self.close_line()
            else:
                self.handle_line(message)

    def handle_line(self, message: Message) -> None:
        kind, name, content, descriptors = message
        if kind == KEEP:
            self.entries.keep(name, content, descriptors)
            return
        if kind == DROP:
            self.entries.drop(name)
        elif kind == BIND and len(descriptors) == 2:
            self.start_binder(name, content, *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)

    def close_line(self) -> None:
        if self.line is not None:
            self.line.close()
            self.line = None

    def start_binder(self, name: str, folder: bytes, bound: int, answers: int) -> None:
        """Start the process that binds a socket in the mount: it waits for the daemon, which waits for its answer."""
        reader, writer = os.pipe()
        os.write(writer, name.encode())
        os.close(writer)
        place = os.path.join(self.config["point"], os.path.basename(os.fsdecode(folder)))
        pid = os.fork()
        if pid == 0:
            try:
                os.dup2(reader, 0)
                os.dup2(answers, 1)
                os.dup2(answers, 2)
                os.dup2(bound, 3)
                os.closerange(4, 1 << 16)
                command = [*self.config["binder"], "3", place]
                os.execv(command[0], command)
            finally:
                os._exit(127)
        os.close(reader)
        self.binders.add(pid)

    # -- the end ---------------------------------------------------------------------------------------

    def is_unmounted(self) -> bool:
        """Whether the kernel has ended the connection, or the mount is gone before a supervisor has brought it."""
        connection = self.entries.get_descriptor(CONNECTION)
        if connection is None:
            is_left = self.is_adopting and self.owner is None
            return is_left and find_device(self.config["point"]) != self.config["device"]
        poll = select.poll()
        poll.register(connection, 0)
        return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))

    def give_up(self, why: str) -> int:
        """Abort the connection, as nobody serves it: callers get an error. Returns the exit status."""
        self.say(f"{why}: the mount is given up, and what was not stored is lost")
        switch = self.entries.get_descriptor(SWITCH)
        switch = self.config.get("switch") if switch is None else switch
        if switch is not None:
            with suppress(OSError):
                os.write(switch, b"1")
        return 1

    def find_end(self) -> int | None:
        """Find whether this process has to end, and with which exit status. None: it goes on."""
        now = time.monotonic()
        if self.is_unmounted():
            self.say("it is unmounted")
            return 0
        alone = now - self.alone_since if self.owner is None else 0.0
        if self.is_adopting and alone > ADOPT_SECONDS:
            return self.give_up(f"no supervisor had its connection within {ADOPT_SECONDS:g} s")
        if self.config["wait"] and alone > self.config["wait"] and not self.told_to_end:
            return self.give_up(f"nobody served it for {self.config['wait']:g} s")
        stays_at = self.told_to_end + STAYS_SECONDS
        if self.told_to_end and now > stays_at and self.owner is not None and self.staged is None:
            self.say(f"this process ends; {self.owner.name} keeps the mount for the next one")
            return 0
        if self.told_to_end and now > self.told_to_end + self.config["grace"]:
            self.unmount()
            self.give_up(f"this process ends, and nobody serves it within {self.config['grace']:g} s")
            return 0
        return None

    def unmount(self) -> None:
        pid = os.fork()
        if pid == 0:
            try:
                os.execvp("umount", ["umount", "-i", "-l", self.config["point"]])
            finally:
                os._exit(127)
        os.waitpid(pid, 0)

    # -- the loop --------------------------------------------------------------------------------------

    def run_loop(self) -> int:
        """Run until the mount has ended, or this process is told to end. Returns the exit status."""
        wake = take_signals()
        self.say("a living mount is taken over" if self.is_adopting else "mounted: calls wait for a supervisor")
        while True:
            poll = select.poll()
            poll.register(wake, select.POLLIN)
            poll.register(self.listener, select.POLLIN)
            if self.line is not None and self.staged is None:
                poll.register(self.line, select.POLLIN)
            peers = [*self.waiting, *([self.owner] if self.owner is not None else [])]
            for peer in peers:
                poll.register(peer.stream, select.POLLIN)
            ready = {descriptor for descriptor, _ in poll.poll(1000 * LOOK_SECONDS)}
            if wake.fileno() in ready:
                self.handle_signals(wake.recv(100))
            if self.line is not None and self.line.fileno() in ready:
                self.read_line()
            for peer in peers:
                if peer.stream.fileno() in ready:
                    self.read_supervisor(peer)
            if self.listener.fileno() in ready:
                self.accept_supervisor()
            self.pass_turn()
            status = self.find_end()
            if status is not None:
                return status

    def handle_signals(self, caught: bytes) -> None:
        if any(number in STOP_SIGNALS for number in caught):
            self.told_to_end = self.told_to_end or time.monotonic()
        for pid in list(self.binders):
            if os.waitpid(pid, os.WNOHANG)[0]:
                self.binders.discard(pid)


def main() -> None:
    os.chdir("/")
    with open("/proc/self/comm", "w") as comm:
        comm.write("kvfuse-hold")
    _, files_max = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files_max, files_max))  # the entries contain descriptors of clients
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    sys.exit(Hold(json.loads(sys.argv[1])).run_loop())


if __name__ == "__main__":
    main()
