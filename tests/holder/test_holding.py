"""The daemon's side of its holder, against a holder's end of a socket."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time

import pytest
from mounting import PATIENCE_S, temporary_mount, wait_until
from stuck_daemon import NAME, STUCK_DAEMON

from kvfuse.holder import child as holder_child
from kvfuse.holder import daemon_side as holding
from kvfuse.holder.daemon_side import Holding
from kvfuse.holder.guarding import open_switch
from kvfuse.kept.keeper import CONTENT_SIZE_MAX

MESSAGES = 2000
LOOK_UPS = (262, 332) if os.uname().machine == "x86_64" else (79, 291)
"""numbers of newfstatat and statx"""


def test_what_was_taken_is_named_until_it_is_dropped_or_replaced() -> None:
    theirs, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        for name in (b"ring/a", b"ring/b", b"ring/c", b"tier/0"):
            theirs.send(bytes([holder_child.KEPT]) + name + b"\0content")
        theirs.send(bytes([holder_child.START]))
        keeper = Holding(ours.detach())
        assert keeper.wait_for_turn()
        taken = keeper.take("ring/a")
        assert taken is not None
        assert taken.content == b"content"
        assert keeper.take("ring/a") is None
        assert keeper.list_names("ring/") == ["ring/a", "ring/b", "ring/c"]
        keeper.drop("ring/a")
        keeper.keep("ring/b")
        assert keeper.list_names("ring/") == ["ring/c"]
        keeper._socket.close()


def test_many_things_come_in_few_messages() -> None:
    theirs, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    descriptors = [os.memfd_create(f"thing-{number}") for number in range(3)]
    things = [(f"ring/{number}", b"x" * (number % 50), descriptors[: number % 4]) for number in range(400)]
    things[200] = "ring/200", bytes(CONTENT_SIZE_MAX), []
    with theirs:
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        messages = list(holder_child.pack_things(things))
        assert len(messages) < len(things) / 10
        for content, passed in messages:
            assert len(content) < holder_child.MESSAGE_SIZE_MAX
            socket.send_fds(theirs, [bytes([holder_child.MANY]), b"\0", content], passed)
        theirs.send(bytes([holder_child.START]))
        keeper = Holding(ours.detach())
        assert keeper.wait_for_turn()
        assert keeper.list_names("") == [name for name, _, _ in things]
        for name, content, passed in things:
            taken = keeper.take(name)
            assert taken is not None
            assert taken.content == content
            assert [os.readlink(f"/proc/self/fd/{one}") for one in taken.descriptors] == [
                os.readlink(f"/proc/self/fd/{one}") for one in passed
            ]
            for one in taken.descriptors:
                os.close(one)
        keeper._socket.close()
    for one in descriptors:
        os.close(one)


def test_what_has_no_room_is_passed_on_although_nothing_more_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holding, "SOCKET_SIZE", 4096)
    theirs, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        theirs.settimeout(PATIENCE_S)
        theirs.send(bytes([holder_child.START]))
        keeper = Holding(ours.detach())
        assert keeper.wait_for_turn()
        descriptor = os.memfd_create("kept")
        for number in range(MESSAGES):
            keeper.keep(f"name/{number}", b"content", [descriptor])
        assert keeper._outbox._waiting, "the socket has room for all"
        os.close(descriptor)
        names = []
        while len(names) <= MESSAGES:
            data, descriptors = holder_child.receive_datagram(theirs)
            names.append(data[1:].partition(b"\0")[0].decode())
            assert len(descriptors) == (data[0] == holder_child.KEEP)
            for one in descriptors:
                os.close(one)
        assert names[1:] == [f"name/{number}" for number in range(MESSAGES)]  # the first one greets
        keeper._socket.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="others may not have so much on its way")
def test_a_daemon_that_ends_left_thousands_of_messages() -> None:
    theirs, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        theirs.settimeout(PATIENCE_S)
        theirs.send(bytes([holder_child.START]))
        keeper = Holding(ours.detach())
        assert keeper.wait_for_turn()
        for number in range(MESSAGES):
            keeper.keep(f"name/{number}", b"content")
        keeper._socket.close()
        count = 0
        while holder_child.receive_datagram(theirs)[0]:
            count += 1
        assert count == 1 + MESSAGES


def test_a_daemon_that_takes_nothing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holder_child, "SEND_SECONDS", 0.2)
    child = holder_child.spawn(["/bin/sleep", "1000"], "/")
    try:
        with pytest.raises(TimeoutError):
            for _ in range(1000):
                child.send(holder_child.KEPT, "name", bytes(60_000))
    finally:
        os.kill(child.pid, signal.SIGKILL)
        os.waitpid(child.pid, 0)
        child.close()


@pytest.mark.root
def test_a_call_that_no_signal_ends_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a write to a disk that is late: the next daemon may write to the same place. Here it is a look-up."""
    monkeypatch.setattr(holder_child, "WRITES", LOOK_UPS)
    with temporary_mount((), STUCK_DAEMON) as mount:
        with open(open_switch(os.stat(mount.point).st_dev), "w") as switch:
            child = holder_child.spawn([sys.executable, "-c", f"import os; os.stat({str(mount.point / NAME)!r})"], "/")
            wait_until(lambda: f"asked for {NAME}" in mount.log.read_text(), "the look-up")
            os.kill(child.pid, signal.SIGKILL)
            wait_until(lambda: holder_child.is_acting(child.pid), "the end of all but the call")
            killed = time.monotonic()
            child.wait_for_last_thread()
            assert time.monotonic() - killed > 0.9 * holder_child.WRITE_SECONDS
            switch.write("1")
        child.wait_for_last_thread()
        assert os.waitpid(child.pid, 0) == (child.pid, signal.SIGKILL)
        child.close()
        mount.kill()
