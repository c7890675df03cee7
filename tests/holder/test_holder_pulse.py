"""Whether a daemon is taken for silent, and how soon another one follows: without processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from kvfuse.holder import pulse as holder_pulse
from kvfuse.holder.child import ALIVE, ASK, DIED, Child, receive_datagram
from kvfuse.holder.pace import PAUSES, Failures
from kvfuse.holder.pulse import ASK_SECONDS, SILENT_SECONDS, START_SECONDS, Pulse

pytestmark = pytest.mark.ring(1)

LOOK = 0.25
"""seconds between looks of the holder"""


class Clock:
    """Of a holder that looks again and again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(holder_pulse.time, "monotonic", lambda: self.now)
        self.pulse = Pulse()

    def looks(self, seconds: float, step: float = LOOK) -> int:
        """Look for so long; returns how often the daemon was asked."""
        asked, end = 0, self.now + seconds
        while self.now < end:
            self.now += step
            if self.pulse.is_due():
                self.pulse.note_question()
                asked += 1
        return asked

    def is_lost(self, *, is_ready: bool = True) -> bool:
        return self.pulse.is_lost(os.getpid(), is_ready=is_ready)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_one_that_answers_is_asked_each_second(clock: Clock) -> None:
    for _ in range(100):
        assert clock.looks(ASK_SECONDS) == 1
        clock.pulse.note_answer()
        assert not clock.is_lost()


def test_one_that_is_silent_is_lost_after_a_while_and_later_before_it_is_ready(clock: Clock) -> None:
    assert clock.looks(ASK_SECONDS + SILENT_SECONDS) == 1, "it is asked once"
    assert not clock.is_lost()
    clock.looks(2 * LOOK)
    assert clock.is_lost()
    assert not clock.is_lost(is_ready=False)
    clock.looks(START_SECONDS)
    assert clock.is_lost(is_ready=False)
    clock.pulse.note_answer()
    assert not clock.is_lost()


def test_time_in_which_the_holder_did_not_run_does_not_count(clock: Clock) -> None:
    clock.looks(ASK_SECONDS)
    clock.now += 3600
    clock.looks(1.0)
    assert not clock.is_lost()
    clock.looks(SILENT_SECONDS)
    assert clock.is_lost()


def test_a_debugged_daemon_is_waited_for(clock: Clock) -> None:
    follow = "import ctypes, os, sys; ctypes.CDLL(None).ptrace(0, 0, 0, 0); print(flush=True); sys.stdin.read()"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", follow], stdin=pipe, stdout=pipe) as traced:
        assert traced.stdout is not None
        traced.stdout.readline()
        clock.looks(ASK_SECONDS + 2 * SILENT_SECONDS)
        assert not clock.pulse.is_lost(traced.pid, is_ready=True)
        assert clock.pulse.silent == 0
        clock.looks(2 * SILENT_SECONDS)
        traced.communicate()
    assert clock.is_lost()


def child_of(hello: bytes) -> tuple[Child, socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.setblocking(False)
    child = Child(ours, os.getpid(), os.pidfd_open(os.getpid()))
    child.read_hello(hello)
    return child, theirs


def test_a_former_version_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(holder_pulse.time, "monotonic", lambda: now)
    for hello, is_asked in (
        (b'{"version": "0", "problem": ""}', False),
        (b'{"version": "1", "problem": "", "answers": true}', True),
    ):
        child, theirs = child_of(hello)
        now += 2 * ASK_SECONDS
        assert not child.is_lost()
        if is_asked:
            assert receive_datagram(theirs)[0][0] == ASK
            theirs.send(bytes([ALIVE]) + b"\0")
            child.receive()
            assert not child.pulse.silent
        else:
            with pytest.raises(BlockingIOError):
                receive_datagram(theirs)
        theirs.close()
        child.close()


def test_causes_of_deaths() -> None:
    child, theirs = child_of(b'{"version": "1", "problem": ""}')
    found = [child.find_cause(code) for code in (-9, -11, 1)]
    assert found == ["killed", "crash", "exit"]
    theirs.send(bytes([DIED]) + b"\0ValueError()")
    child.receive()
    assert (child.find_cause(70), child.pulse.reason) == ("exception", "ValueError()")
    theirs.close()
    child.close()


def test_a_mount_is_not_given_up_for_daemons_that_served() -> None:
    failures = Failures()
    for _ in range(1000):
        failures.count_death(0.1, was_killed=False, was_ready=True)
        assert failures.pause_seconds <= 1.0
    assert failures.pause_seconds == 1.0
    failures.count_death(10.0, was_killed=False, was_ready=True)
    assert failures.pause_seconds == 0.0
    for pause in PAUSES:
        assert failures.pause_seconds <= pause
        failures.count_death(0.1, was_killed=False, was_ready=False)
    failures.count_death(0.1, was_killed=False, was_ready=False)
    assert failures.are_too_many
