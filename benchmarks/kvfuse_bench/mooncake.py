"""Mooncake's store beside the rings: its master and a client, both of another Python environment."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

from kvfuse.errors import KvfuseError
from kvfuse_bench.batches import Timing
from kvfuse_cluster.process import signals_later

PROGRAM = Path(__file__).with_name("mooncake_store.py")
LOOPBACK = "127.0.0.1"
MASTER = "mooncake_master"
"""installed beside the interpreter"""
START_SECONDS_MAX = 20.0
REPLY_SECONDS_MAX = 120.0
MEMORY_SIZE_MIN = 16 << 20
"""of a segment and of a buffer: it takes no less"""


class Mooncake:
    """A running store; made by ``mooncake_store``."""

    def __init__(self, process: subprocess.Popen[bytes], log: IO[bytes]) -> None:
        self._process = process
        self._log = log
        self._rest = b""
        self._reply()  # the first says that it is ready

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, operation: str, **words: Any) -> list[float]:
        """The seconds of each batch. KvfuseError where the store fails, ends, or does not answer in time."""
        request = json.dumps({"operation": operation, **words}) + "\n"
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(request.encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure("ended") from None
        return self._reply()

    def timing(self, operation: str, **words: Any) -> Timing:
        """``ask``, the same in every round."""
        return lambda _round: self.ask(operation, **words)

    def _reply(self) -> list[float]:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        deadline = time.monotonic() + REPLY_SECONDS_MAX
        while b"\n" not in self._rest:
            if not select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise self._failure(f"does not answer within {REPLY_SECONDS_MAX:.0f} s")
            part = os.read(descriptor, 1 << 16)
            if not part:
                raise self._failure("ended")
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\n")
        reply = json.loads(line)
        if "error" in reply:
            raise self._failure(reply["error"])
        times: list[float] = reply["seconds"]
        return times

    def _failure(self, what: str) -> KvfuseError:
        size = os.fstat(self._log.fileno()).st_size
        tail = os.pread(self._log.fileno(), 500, max(0, size - 500)).decode(errors="replace").strip()
        return KvfuseError(f"Mooncake's store {what}; it said last: {tail or 'nothing'}")


@contextlib.contextmanager
def mooncake_store(python: Path, segment_size: int, buffer_size: int, *, over_tcp: bool = False) -> Iterator[Mooncake]:
    """Mooncake of the environment of the interpreter ``python``, ended with the block.

    The client keeps its blocks in a segment of ``segment_size`` bytes of its own memory, or ``over_tcp`` of another
    process, and moves them from and to a buffer of ``buffer_size``. KvfuseError where it does not start.
    """
    with _starter(python) as start:
        if over_tcp:
            start(segment_size, MEMORY_SIZE_MIN)
        yield start(0 if over_tcp else segment_size, buffer_size)


class Place(NamedTuple):
    """Where a process runs: a host's address, and what stands before its command."""

    address: str = LOOPBACK
    within: tuple[str, ...] = ()


HERE = Place()


@contextlib.contextmanager
def mooncake_hosts(
    python: Path, segment_size: int, buffer_size: int, master: str, places: tuple[Place, Place]
) -> Iterator[tuple[Mooncake, Mooncake]]:
    """As `mooncake_store` over TCP, on two hosts: who keeps the blocks, and who gets them. ``master``: its address."""
    with _starter(python, master) as start:
        owner = start(segment_size, MEMORY_SIZE_MIN, places[0])
        yield owner, start(0, buffer_size, places[1])


class _Start(Protocol):
    def __call__(self, segment: int, buffer: int, place: Place = HERE, /) -> Mooncake: ...


@contextlib.contextmanager
def _starter(python: Path, address: str = LOOPBACK) -> Iterator[_Start]:
    """What starts clients, beside a master at this address."""
    rpc_port, metrics_port = _free_ports(2)
    master = [str(python.parent / MASTER), f"--rpc_port={rpc_port}", f"--rpc_address={address}"]
    master += [f"--metrics_port={metrics_port}", f"--metrics_host={address}"]
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(tempfile.TemporaryFile())
        _wait_for_port(address, rpc_port, stack.enter_context(_running(master, log, log)))

        def start(segment: int, buffer: int, place: Place = HERE, /) -> Mooncake:
            sizes = (str(max(segment, MEMORY_SIZE_MIN) if segment else 0), str(max(buffer, MEMORY_SIZE_MIN)))
            # -I: modules of this folder must not take the place of others
            client = [*place.within, str(python), "-I", str(PROGRAM), f"{address}:{rpc_port}", *sizes, place.address]
            return Mooncake(stack.enter_context(_running(client, subprocess.PIPE, log)), log)

        yield start


@contextlib.contextmanager
def _running(command: Sequence[str], stdout: IO[bytes] | int, log: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    with contextlib.ExitStack() as stack:
        with signals_later():
            try:
                process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=stdout, stderr=log, cwd="/")
            except OSError as error:
                raise KvfuseError(f"{command[0]}: {error.strerror}") from error
            stack.enter_context(process)
            stack.callback(process.kill)
        yield process


def _wait_for_port(address: str, port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS_MAX
    while True:
        try:
            socket.create_connection((address, port), 1.0).close()
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise KvfuseError(f"{MASTER} does not listen on port {port}") from None
            time.sleep(0.01)
        else:
            return


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
