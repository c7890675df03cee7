"""One server as a process that outlives this one: its log and its pid stand in a folder, and it is ended by its pid.

``FOLDER/NAME.log`` gets what the server says; ``FOLDER/NAME.pid`` holds "pid start-time". The start time (of
/proc/PID/stat) tells the server from a later process that was given its pid, so any process may signal or
end what another one started, and nothing else is ever hit.

Everything here is synchronous: starting servers is for the command line and for tests.
"""

from __future__ import annotations

import os
import random
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from kvfuse.errors import ClusterError

START_SECONDS = 30.0
STOP_SECONDS = 10.0
"""how long a server may take to end by itself before it is killed"""
POLL_SECONDS = 0.02
PORTS = range(20_000, 32_000)
"""below what the kernel gives to outgoing connections: a port stays free while its server is down"""


class Server:
    """One server process. ``command`` is only needed to start it."""

    def __init__(
        self, folder: Path, name: str, command: Sequence[str | Path] = (), environment: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self.command = tuple(map(str, command))
        self.log = folder / f"{name}.log"
        self._pid_file = folder / f"{name}.pid"
        self._environment = None if environment is None else {**os.environ, **environment}
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Its process id; 0 when it is not running (a stopped one, SIGSTOP, is running)."""
        if self._child is not None and self._child.poll() is None:  # this also takes its exit status, once it ended
            return self._child.pid
        try:
            pid, started = map(int, self._pid_file.read_text().split())
        except (FileNotFoundError, ValueError):
            return 0
        return pid if started and _start_time(pid) == started else 0  # 0: it had ended before that was read

    def start(self, is_ready: Callable[[], bool], patience: float = START_SECONDS) -> None:
        """Start it and wait until it answers. ClusterError, with the end of its log, when it ends or takes too long."""
        self.launch()
        self.wait_ready(is_ready, patience)

    def launch(self) -> None:
        """Start it in a session of its own, so that it outlives the terminal. It may not answer yet."""
        if self.pid:
            raise ClusterError(f"{self.name} is running already (pid {self.pid})")
        with self.log.open("ab") as log, signals_later():
            try:
                self._child = subprocess.Popen(
                    self.command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=self._environment,
                    start_new_session=True,
                )
            except OSError as error:
                raise ClusterError(f"{self.name} cannot be started: {error}") from error
            self._pid_file.write_text(f"{self._child.pid} {_start_time(self._child.pid)}\n")

    def wait_ready(self, is_ready: Callable[[], bool], patience: float = START_SECONDS) -> None:
        """Wait until ``is_ready``; ClusterError with the end of its log when it ended before, or after ``patience``."""
        if wait_until(lambda: is_ready() or not self.pid, patience) and self.pid:
            return
        state = "does not answer" if self.pid else "ended"
        raise ClusterError(f"{self.name} {state}; the end of {self.log}:\n{self.log_tail()}")

    def log_tail(self, size: int = 2000) -> str:
        """The last bytes of its log."""
        return self.log.read_bytes()[-size:].decode(errors="replace") if self.log.exists() else ""

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal; after SIGKILL wait until it is gone. Nothing where it is not running."""
        pid = self.pid
        if not pid:
            return
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return
        if number == signal.SIGKILL and not wait_until(lambda: not self.pid, STOP_SECONDS):
            raise ClusterError(f"{self.name} (pid {pid}) does not end")

    def stop(self, patience: float = STOP_SECONDS) -> None:
        """End it: SIGTERM, then SIGKILL. Idempotent; one that is stopped (SIGSTOP) is woken for it."""
        self.kill(signal.SIGTERM)
        self.kill(signal.SIGCONT)
        if not wait_until(lambda: not self.pid, patience):
            self.kill(signal.SIGKILL)
        self._pid_file.unlink(missing_ok=True)


@contextmanager
def signals_later() -> Iterator[None]:
    """Signals that end or unwind this process take effect after the body.

    For starting a process: one that came while the child begins would leave a process that nobody knows.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # Python's handlers run in the main thread only
        return
    came: list[int] = []
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    kept = {number: handler for number, handler in kept.items() if handler not in (signal.SIG_IGN, None)}
    try:
        for number in kept:
            signal.signal(number, lambda number, frame: came.append(number))
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
        for caught in came:
            signal.raise_signal(caught)


@contextmanager
def child(command: Sequence[str | Path], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """A process that ends with the body at the latest, also when a signal unwinds that. ``options``: as Popen has."""
    process: subprocess.Popen[Any] | None = None
    try:
        with signals_later():
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, **options)
        yield process
    finally:
        if process is not None:
            process.kill()
            process.__exit__(None, None, None)  # its pipes are closed, its status is taken


def wait_until(condition: Callable[[], bool], patience: float) -> bool:
    """Poll until ``condition`` holds; False when it did not within ``patience`` seconds."""
    deadline = time.monotonic() + patience
    while not condition():
        if time.monotonic() > deadline:
            return False
        select.select([], [], [], POLL_SECONDS)
    return True


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nobody listens on."""
    with ExitStack() as held:
        ports: list[int] = []
        for port in random.SystemRandom().sample(PORTS, 1000):
            if len(ports) == count:
                break
            candidate = held.enter_context(socket.socket())
            try:
                candidate.bind(("127.0.0.1", port))
            except OSError:
                continue
            ports.append(port)
        else:
            raise ClusterError(f"no {count} free ports between {PORTS.start} and {PORTS.stop}")
    return ports


def _start_time(pid: int) -> int:
    """Clock ticks after boot at which the process began; 0 when there is none, or only its exit status is left."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])
