"""Keeps a mount while daemons end and start: ``python main.py CONFIG``, the first process of a mount.

The holder starts the daemon and keeps the daemon's entries (`kept.keeper`): the kernel's connection first of all, so
that requests wait for the next daemon, and do not fail. When a daemon dies, the holder starts another one, which gets
all entries. `child` has the messages between the two.

*Standby.* The ``standby`` has imported everything and waits. Whenever the holder needs a daemon, the standby forks one
and waits on; so it forks the first daemon, too. The holder is a subreaper (prctl(2)), so that such a daemon is its own
child: the process in between ends at once. The holder replaces a standby that dies.

*Upgrades.* The next daemon, of another version, stands by, and one more of the present version for the way back. Then
the holder asks the serving one to leave; when it has, the next one gets all entries. If that one dies, or is not ready
in time, the other one takes its place. A daemon begins to serve when its predecessor is dead, never earlier.

*Apart.* Where a process in another container keeps the mount (`hold`), this one is the supervisor of `kvfuse serve`: it
waits for its turn, gets the entries from there, and does the rest as ever. It never ends the mount: told to end, it
has the daemon leave everything to the next supervisor.

When the holder dies, the kernel kills the daemon, and the holder's guard (`guard`) aborts the connection: waiting
callers get an error. A daemon counts as dead when its first thread has ended: other threads of it may wait in the
kernel for an answer that only the next daemon can give.

The holder uses little of the standard library, and interprets no entry but the connection and its switch (`things`).
"""

from __future__ import annotations

import ctypes
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
    DROP,
    END,
    HELLO,
    KEEP,
    LEAVE,
    LEFT,
    LINE,
    READY,
    START,
    STAYS,
    SWITCHED,
    Child,
    is_dead,
    spawn,
)
from kvfuse.holder.held import HeldThings
from kvfuse.holder.pace import Backoff, Failures
from kvfuse.holder.signals import STOP_SIGNALS, take_signals
from kvfuse.holder.status_socket import (
    BEGINNING,
    GOING_BACK,
    LEAVING,
    STANDING_BY,
    DaemonFacts,
    StatusSocket,
    Upgrade,
    read_pid_namespace,
)
from kvfuse.holder.things import Things

PR_SET_CHILD_SUBREAPER = 36
"""option of prctl(2)"""
FORK_TRIES = 3
LOOK_SECONDS = 0.2
"""between looks at a daemon: no event reports the end of its first thread alone"""
LEAVE_SECONDS, LEFT_SECONDS = 5.0, 10.0
"""timeouts of a daemon that stores everything, while calls wait, and then ends; after both it is killed"""


class Holder:
    """The loop. ``config``: ``command`` of a daemon and its ``folder``, ``guard`` (command of the guard), ``point``,
    ``log`` (path or None), ``standby`` (bool), ``report`` (a descriptor that gets the start's outcome, or None),
    ``hold`` (path of the socket of a process that keeps the mount, if there is one)."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.command: list[str] = list(config["command"])
        self.apart = HeldThings(str(config["hold"]), str(config["point"])) if config.get("hold") else None
        """the entries, if a process in another container keeps the mount"""
        self.things = self.apart or Things(list(map(str, config["guard"])), str(config["point"]))
        self.serving: Child | None = None
        self.standby: Child | None = None
        self.pace = Backoff()
        """delays of standby processes"""
        self.was_ready = False
        self.failures = Failures()
        self.told_to_end: int | None = None
        self.status = 1
        self.dying: list[int] = []
        """processes whose last thread has not ended"""
        self.status_socket = StatusSocket()
        self.upgrade: Upgrade | None = None
        self.facts = DaemonFacts()
        self.stalled_at = 0.0
        """since when no daemon answers; 0: one does"""
        self.leave_due = 0.0
        """when to ask the daemon to leave, once this process is told to end and the mount is kept elsewhere"""

    # -- its output ------------------------------------------------------------------------------------

    def warn(self, text: str) -> None:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        try:
            line = repr(f"{stamp} {os.getpid()} WARNING holder: {self.config['point']}: {text}")  # safe for terminals
            os.write(2, line[1:-1].encode() + b"\n")
        except OSError:
            pass

    def report_start(self, content: bytes) -> None:
        """Report the outcome of the start to the process that waits for it; once."""
        report = self.config.pop("report", None)
        if isinstance(report, int):
            try:
                os.write(report, content)
            except BrokenPipeError:
                pass
            os.close(report)

    def redirect_to_log(self) -> None:
        """Redirect the output, once the first daemon is ready: a reader of the former output then gets its end."""
        path = self.config.pop("log", None)
        if path:
            try:
                log = os.open(str(path), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            except OSError:  # a sick disk: the mount runs without a log
                log = os.open(os.devnull, os.O_WRONLY)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.close(log)

    # -- daemons ---------------------------------------------------------------------------------------

    def spawn(self, command: list[str], *, heard: bool = False, checked: bool = False) -> Child:
        return spawn(command, str(self.config["folder"]), heard=heard, checked=checked)

    def start_daemon(self, waiting: Child | None = None) -> None:
        """Start the next daemon: of this process, else of the standby, else of a new one."""
        if waiting is None:
            waiting, self.standby = self.standby or self.spawn(self.command), None
        self.serving = waiting
        if waiting.has_said_hello:
            self.begin_turn(waiting)

    def begin_turn(self, waiting: Child) -> None:
        """Let a waiting process serve: a fork of it, if it is to be the standby."""
        is_new = self.upgrade is not None and self.upgrade.phase == BEGINNING and waiting.standby is not None
        if waiting.may_fork and (waiting.standby if is_new else self.config["standby"]):
            for _ in range(FORK_TRIES):
                try:
                    self.serving = waiting.fork()
                except TimeoutError:
                    self.warn(f"process {waiting.pid}, which stands by, does not answer: it is killed")
                    os.kill(waiting.pid, signal.SIGKILL)
                    return  # the loop finds it dead, and continues
                except OSError:
                    continue
                self.standby = waiting
                self.give_turn(self.serving)
                return
        self.give_turn(waiting)

    def give_turn(self, child: Child) -> None:
        """Send a daemon all entries, and START."""
        try:
            self.things.send_all_to(child)
            is_afresh = self.upgrade is not None and self.upgrade.phase == BEGINNING
            # A container that begins has its mount.conf for a reason, unless it is wrong.
            is_afresh |= self.things.is_apart and not self.was_ready and not child.problem
            said = {"afresh": is_afresh, "deaths": self.facts.causes, "apart": self.things.is_apart}
            line = self.things.take_line()
            try:
                child.send(START, "", json.dumps(said).encode(), line)
            finally:
                for descriptor in line:
                    os.close(descriptor)
            child.begun = time.monotonic()
        except TimeoutError:
            self.warn(f"the daemon {child.pid} reads no messages: it is killed")
            child.kill("silent")
        except OSError:
            pass  # it is dead: the loop learns that from its pidfd, and starts another one

    def read_message(self, child: Child) -> bool:
        """Read and handle one message of a daemon. False: its end is closed."""
        message = child.receive()
        if message is None:
            return False
        kind, name, content, descriptors = message
        if kind == HELLO:
            try:
                child.read_hello(content)
            except (ValueError, LookupError, TypeError, AttributeError):
                self.warn(f"process {child.pid} is killed: it is no daemon of kvfuse by its first message")
                os.kill(child.pid, signal.SIGKILL)
                return True
            if child is self.serving:
                self.begin_turn(child)
        elif kind == KEEP and child is self.serving:
            self.things.keep(name, content, descriptors)
            return True
        elif kind == DROP and child is self.serving:
            self.things.drop(name)
        elif kind == READY and child is self.serving:
            self.note_ready(child)
        elif kind == LEFT and child is self.serving:
            child.has_left = True
            os.kill(child.pid, signal.SIGKILL)  # it has handed everything over
        elif kind == SWITCHED and child is self.serving and self.apart is not None:
            self.apart.deposit()
        elif kind == STAYS and self.upgrade is None and child is self.serving:
            self.warn(f"the daemon cannot make way yet: {content.decode()}")
            self.leave_due = time.monotonic() + LOOK_SECONDS
        elif kind == STAYS and self.upgrade is not None and child is self.serving:
            self.stalled_at = 0.0
            self.refuse_upgrade(f"the daemon cannot make way: {content.decode()}")
        elif kind == END:
            child.has_ended = True
            self.report_start(content or b"{}\n")
        for descriptor in descriptors:
            os.close(descriptor)
        return True

    def handle_death(self, child: Child) -> None:
        """Read all messages of a dead daemon, then start another one, or end the mount."""
        child.socket.setblocking(False)
        try:
            while self.read_message(child):
                pass
        except BlockingIOError:
            pass
        child.wait_for_last_thread()
        pid, status = os.waitpid(child.pid, os.WNOHANG)
        code = os.waitstatus_to_exitcode(status) if pid else -signal.SIGKILL
        if not pid:
            self.dying.append(child.pid)
        words = child.read_last_words()
        child.close()
        how = child.pulse.reason or (f"exit status {code}" if code >= 0 else signal.Signals(-code).name)
        if child is not self.serving:
            self.handle_death_beside(child, words or how)
            return
        self.serving = None
        if child.is_ready and not self.stalled_at:
            self.stalled_at = time.monotonic()
        if self.continue_upgrade(child, how):
            return
        if self.told_to_end is not None and self.things.is_apart:
            self.finish_mount(0)
            return
        if self.told_to_end is not None:
            self.failures.count_death_at_end()
        begins_anew = self.was_ready or self.things.is_apart
        if child.has_ended or not begins_anew or not self.failures.may_end_anew:
            if self.was_ready and not child.has_ended and self.status_socket.is_on_top(str(self.config["point"])):
                self.things.unmount()
            self.finish_mount(code if code >= 0 else 128 - code)
            return
        lived = time.monotonic() - child.begun
        was_killed = code == -signal.SIGKILL and not child.pulse.cause
        self.failures.count_death(lived, was_killed=was_killed, was_ready=child.is_ready)
        self.facts.count_death(how, child.find_cause(code))
        what = f"the daemon {child.pid} is dead ({how})"
        while not self.failures.are_too_many:
            pause = self.failures.pause_seconds
            self.warn(f"{what}: another one takes over" + (f" in {pause:g} s" if pause else ""))
            if pause:
                time.sleep(pause)  # no daemon exists now that a signal or a message could be for
            try:
                self.start_daemon()
            except OSError as error:  # no process, memory or descriptor is free
                how = what = f"no daemon can be started ({error})"
                self.failures.count_death(0.0, was_killed=False, was_ready=False)
            else:
                return
        what = "calls wait for another supervisor"
        if not self.things.is_apart:
            what = "the mount is given up, and what was not stored is lost"
        self.warn(f"too many daemons in a row have failed, the last with {how}: {what}")
        self.things.abort_connection()
        self.finish_mount(1)

    def note_ready(self, child: Child) -> None:
        """Note that a daemon is ready."""
        child.is_ready = True
        self.report_start(b"{}\n")
        self.redirect_to_log()
        self.status_socket.open_socket(str(self.config["point"]))
        if not self.was_ready and self.status_socket.problem:
            self.warn(f"'kvfuse upgrade' and 'kvfuse status' cannot ask the holder: {self.status_socket.problem}")
        if self.was_ready:
            self.facts.count_stall(time.monotonic() - self.stalled_at)
        self.was_ready, self.stalled_at = True, 0.0
        self.end_upgrade(child)
        if self.standby is not None:
            self.standby.redirect_output(2)
        status = f"STATUS=process {child.pid}, version {child.version}, serves {self.config['point']}"
        self.status_socket.tell_systemd("READY=1", f"MAINPID={os.getpid()}", status)
        if self.told_to_end is not None and not self.things.is_apart:
            os.kill(child.pid, signal.SIGTERM)

    # -- upgrades --------------------------------------------------------------------------------------

    def answer_caller(self) -> None:
        """Accept and answer a caller of the status socket, or begin its upgrade."""
        client = self.status_socket.accept_caller()
        if client is None:
            return
        child = self.serving
        if client.program is None and child is not None:
            phase = self.upgrade.phase if self.upgrade is not None else None
            said = {"pid": child.pid, "version": child.version, "serves": child.is_ready, "upgrade": phase}
            stands_by = self.standby is not None and self.standby.has_said_hello
            waits = round(time.monotonic() - self.stalled_at, 3) if self.stalled_at else None
            if self.apart is not None:
                said["hold"] = "connected" if self.apart.is_whole else "away"
            client.answer(
                holder=os.getpid(),
                pids=read_pid_namespace(),
                **said,
                standby=stands_by,
                waits=waits,
                **vars(self.facts),
            )
        elif self.upgrade is not None or child is None or not child.is_ready or self.told_to_end is not None:
            client.answer(error="another change of daemons is in progress, or the mount is ending: try again")
        else:
            command = [str(client.program), *self.command[1:]]
            try:
                self.standby = self.standby or self.spawn(self.command, heard=True)
                next = self.spawn(command, heard=True, checked=command != self.command)
            except OSError as error:
                client.answer(error=f"no daemon can be started: {error}")
                return
            back, self.standby = self.standby, None
            self.upgrade = Upgrade(client, next, back, command, client.seconds)

    def refuse_upgrade(self, why: str) -> None:
        """End the upgrade without success: the serving daemon goes on, or one of its version follows it."""
        upgrade, self.upgrade = self.upgrade, None
        assert upgrade is not None
        self.warn(f"the upgrade failed: {why}")
        upgrade.answer_client(error=why)
        for child in (upgrade.next, upgrade.back):
            if child is None or child is self.serving:
                continue
            if child is upgrade.back and self.config["standby"] and self.standby in (None, child):
                self.standby = child
            else:
                self.dismiss_child(child)

    def dismiss_child(self, child: Child) -> None:
        """Kill a process that is not needed."""
        if child is self.standby:
            self.standby = None
        self.dying.append(child.kill_unneeded())

    def advance_upgrade(self) -> None:
        """Take the next step of an upgrade, if it is due."""
        upgrade, serving = self.upgrade, self.serving
        if upgrade is None or serving is None:
            return
        child, back = upgrade.next, upgrade.back
        if upgrade.phase == STANDING_BY and child is not None:
            if child.problem:
                self.refuse_upgrade(child.problem)
            elif child.has_said_hello and (back is None or back.has_said_hello):
                upgrade.enter_phase(LEAVING, LEAVE_SECONDS + LEFT_SECONDS)
                self.stalled_at = upgrade.began = time.monotonic()
                with suppress(OSError):  # it has just died, or its socket is full: then it is late
                    serving.send(LEAVE, "", json.dumps({"seconds": LEAVE_SECONDS}).encode())
            elif upgrade.is_late:
                words = child.read_last_words()
                self.refuse_upgrade("the new daemon did not get ready in time" + (f": {words}" if words else ""))
        elif upgrade.is_late:
            is_new = upgrade.phase == BEGINNING
            upgrade.failure = f"it was not ready in {upgrade.seconds:g} s" if is_new else ""
            upgrade.deadline = float("inf")
            self.warn(f"the daemon {serving.pid} is killed: it takes too long, {upgrade.phase}")
            os.kill(serving.pid, signal.SIGKILL)

    def handle_death_beside(self, child: Child, how: str) -> None:
        """Handle the death of a process that did not serve."""
        upgrade = self.upgrade
        if child is self.standby:
            self.standby = None
            self.warn(f"process {child.pid}, which stood by, is dead: {how}")
            self.pace.count_death(time.monotonic() - child.begun)
        if upgrade is not None and child is upgrade.back:
            self.warn(f"the upgrade has no way back: no other daemon of the present version begins: {how}")
            upgrade.back = None
        elif upgrade is not None and child is upgrade.next:
            upgrade.next, upgrade.failure = None, how
            if upgrade.phase == STANDING_BY:
                self.refuse_upgrade(f"the new daemon does not begin: {how}")

    def continue_upgrade(self, child: Child, how: str) -> bool:
        """Let the upgrade start the next daemon after the serving one's death. False: the caller has to do that."""
        upgrade = self.upgrade
        if upgrade is None:
            return False
        upgrade.next = None if child is upgrade.next else upgrade.next
        upgrade.back = None if child is upgrade.back else upgrade.back
        if upgrade.phase in (STANDING_BY, GOING_BACK) or child.has_ended:
            if self.standby is None and not child.has_ended:
                self.standby, upgrade.back = upgrade.back, None
            self.refuse_upgrade(f"the daemon has ended meanwhile ({how})")
            return False
        if upgrade.phase == LEAVING and upgrade.next is not None:
            upgrade.enter_phase(BEGINNING, upgrade.seconds)
            self.start_daemon(upgrade.next)
            return True
        upgrade.failure = upgrade.failure or how
        if upgrade.next is not None:  # it stands by
            self.dismiss_child(upgrade.next)
            upgrade.next = None
        if upgrade.back is None:
            self.refuse_upgrade(f"the new daemon failed: {upgrade.failure}; another of the former version takes over")
            return False
        self.warn(f"the new daemon failed: {upgrade.failure}; the former version takes over")
        upgrade.enter_phase(GOING_BACK, float("inf"))
        self.start_daemon(upgrade.back)
        return True

    def end_upgrade(self, child: Child) -> None:
        """End an upgrade, with success or without, as a daemon is ready."""
        upgrade = self.upgrade
        if upgrade is None or upgrade.phase not in (BEGINNING, GOING_BACK):
            return
        if upgrade.phase == BEGINNING:
            before = None
            if upgrade.back is not None:
                before = upgrade.back.version
                self.dismiss_child(upgrade.back)
            self.command, self.upgrade = upgrade.command, None
            if child.standby is not None:
                self.config["standby"] = child.standby
            self.failures.reset_count()
            self.facts.upgrades += 1
            upgrade.answer_client(before=before, version=child.version, pid=child.pid)
        else:
            self.refuse_upgrade(f"the new daemon failed: {upgrade.failure}; the former version goes on")

    def finish_mount(self, status: int) -> None:
        """Clean up after the end of the mount."""
        self.status = status
        self.serving = None
        self.config["standby"] = False
        self.status_socket.tell_systemd("STOPPING=1")
        self.status_socket.close()
        if self.standby is not None:
            os.kill(self.standby.pid, signal.SIGKILL)
            os.waitpid(self.standby.pid, 0)
            self.standby.close()
            self.standby = None
        self.things.close()
        self.report_start(b"")

    def end_mount(self, number: int) -> None:
        """Pass a stop signal on to the daemon, which ends the mount; or leaves it, where it is kept elsewhere."""
        self.told_to_end = number
        if self.serving is not None and not self.things.is_apart:
            os.kill(self.serving.pid, signal.SIGTERM)

    # -- apart -----------------------------------------------------------------------------------------

    def wait_for_turn(self, wake: socket.socket, apart: HeldThings) -> bool:
        """Wait until this supervisor has the turn, with a process that stands by. False: it is told to end."""
        is_told = False
        while True:
            if self.standby is None and self.pace.is_due:
                self.standby = self.spawn(self.command)
            if self.standby is not None or self.dying:
                self.reap_children()
            if apart.connect() and not is_told:
                self.warn("waits for its turn")
                is_told = True
            poll = select.poll()
            poll.register(wake, select.POLLIN)
            if apart.is_connected:
                poll.register(apart, select.POLLIN)
            child = self.standby
            if child is not None and not child.is_silent:
                poll.register(child.socket, select.POLLIN)
            ready = {descriptor for descriptor, _ in poll.poll(1000 * LOOK_SECONDS)}
            if wake.fileno() in ready and any(caught in STOP_SIGNALS for caught in wake.recv(100)):
                return False
            if child is not None and (child.socket.fileno() in ready or is_dead(child.pid)):
                child.is_silent = not self.read_message(child)
                if child.is_silent or is_dead(child.pid):
                    self.handle_death(child)
            if apart.fileno() in ready and apart.read():
                return True
            if apart.refusal:
                self.warn(f"this supervisor ends: {apart.refusal}")
                return False

    def advance_apart(self, apart: HeldThings, ready: set[int]) -> None:
        """Read from the process that keeps the mount, or look for the next one; leave when told to."""
        serving = self.serving
        if serving is None:
            return
        if apart.fileno() in ready and apart.read() and serving.has_said_hello:
            line = apart.take_line()
            with suppress(OSError):  # it has just died: the next daemon's start sends the entries
                serving.send(LINE, "", b"", line)
            for descriptor in line:
                os.close(descriptor)
        elif apart.connect():
            self.warn("the mount's entries go to the process that keeps it now")
        if apart.refusal:
            self.warn(f"this supervisor ends: {apart.refusal}")
            self.told_to_end = self.told_to_end or signal.SIGTERM
            serving.kill("silent")
        may_leave = apart.is_whole and self.upgrade is None and time.monotonic() > self.leave_due
        if self.told_to_end is not None and may_leave:
            self.leave_due = time.monotonic() + LEAVE_SECONDS + LEFT_SECONDS
            if not serving.is_ready:
                os.kill(serving.pid, signal.SIGKILL)
                return
            with suppress(OSError):  # it has just died
                serving.send(LEAVE, "", json.dumps({"seconds": LEAVE_SECONDS}).encode())

    # -- the loop --------------------------------------------------------------------------------------

    def run_loop(self) -> int:
        """Run until the mount has ended. Returns the exit status."""
        wake = take_signals()
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
        if self.apart is not None and not self.wait_for_turn(wake, self.apart):
            self.finish_mount(0)
            return self.status
        if self.apart is not None and self.apart.device is None:
            self.warn(
                "the mount is not seen here: this container needs the folder above it with propagation from the host"
            )
            self.finish_mount(1)
            return self.status
        self.start_daemon()
        while self.serving is not None:
            self.reap_children()
            children = self.list_children()
            poll = select.poll()
            poll.register(wake, select.POLLIN)
            if self.status_socket.fileno() >= 0:
                poll.register(self.status_socket, select.POLLIN)
            if self.apart is not None and self.apart.is_connected:
                poll.register(self.apart, select.POLLIN)
            for child in children:
                if not child.is_silent:
                    poll.register(child.socket, select.POLLIN)
                poll.register(child.pidfd, select.POLLIN)
            ready = {descriptor for descriptor, _ in poll.poll(1000 * LOOK_SECONDS)}
            if wake.fileno() in ready:
                for caught in wake.recv(100):
                    if caught in STOP_SIGNALS:
                        self.end_mount(caught)
            for child in children:
                if child not in self.list_children():
                    continue  # an earlier one's death has removed it
                if child.socket.fileno() in ready:
                    if self.read_message(child):
                        continue
                    child.is_silent = True
                if child.pidfd in ready or is_dead(child.pid):
                    self.handle_death(child)
            if self.status_socket.fileno() in ready:
                self.answer_caller()
            if self.was_ready and self.serving is not None and self.serving.is_lost():
                self.warn(f"the daemon {self.serving.pid} has not answered for too long: it is killed")
                self.serving.kill("silent")
            self.advance_upgrade()
            if self.apart is not None:
                self.advance_apart(self.apart, ready)
            self.ensure_standby()
        return self.status

    def ensure_standby(self) -> None:
        serving = self.serving
        is_wanted = self.config["standby"] and self.standby is None and self.upgrade is None
        if is_wanted and serving is not None and serving.is_ready and self.pace.is_due:
            try:
                self.standby = self.spawn(self.command)
            except OSError as error:
                self.warn(f"no standby can be started: {error}")
                self.pace.count_death(0.0)

    def reap_children(self) -> None:
        """Reap dead processes, also others' children: the subreaper adopts orphans."""
        self.dying = [pid for pid in self.dying if os.waitpid(pid, os.WNOHANG)[0] == 0]
        known = {*self.dying, *(child.pid for child in self.list_children())}
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if ended.si_pid in known:
                break  # another method reaps it, and a later call the rest
            os.waitpid(ended.si_pid, 0)
            if ended.si_pid == self.things.guard:
                self.things.restart_guard()

    def list_children(self) -> list[Child]:
        upgrade = self.upgrade
        found = [self.serving, self.standby, *((upgrade.next, upgrade.back) if upgrade is not None else ())]
        return list(dict.fromkeys(child for child in found if child is not None))


def main() -> None:
    os.chdir("/")
    config = json.loads(sys.argv[1])
    with open("/proc/self/comm", "w") as comm:
        comm.write("kvfuse-serve" if config.get("hold") else "kvfuse-holder")
    _, files_max = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files_max, files_max))  # the entries contain descriptors of clients
    sys.exit(Holder(config).run_loop())


if __name__ == "__main__":
    main()
