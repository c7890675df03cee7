"""What tests of hostile and dying clients share: what the daemon holds, clients of bare messages, a witness."""

from __future__ import annotations

import array
import json
import os
import re
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from mounting import PATIENCE_S, KvfuseMount, wait_until

from kvfuse.usrbio.protocol.queues import RingMemory
from kvfuse.usrbio.protocol.wire import DESCRIPTORS_MAX, MESSAGE_SIZE_MAX, VERSION, Message, Request

SLOWEST_S = 5.0
"""the longest that a call of the witness may take, on a machine that does much else"""
IDLE_THREADS_MAX = 80
"""threads of the daemon's pools that may be there once and not another time; those of rings are counted exactly"""


def wait_for_rings(mount: KvfuseMount) -> None:
    """A daemon in the foreground has mounted before its socket listens."""

    def accepts() -> bool:
        try:
            with RawClient(mount.point):
                return True
        except (FileNotFoundError, ConnectionRefusedError):
            return False

    wait_until(accepts, "the control socket")


# -- what the daemon holds --------------------------------------------------------------------------


def stats(mount: KvfuseMount) -> dict[str, Any]:
    return dict(json.loads((mount.point / ".kvfuse" / "stats").read_text()))


class Footprint(NamedTuple):
    """What clients can make the daemon hold. The tier's arenas and the volume's own files are its cache: not here."""

    registered: dict[str, int]
    descriptors: dict[str, int]
    """by kind"""
    mapped: int
    """maps of memory that is a client's, or a ring's"""


def footprint(mount: KvfuseMount) -> Footprint:
    descriptors: Counter[str] = Counter()
    for entry in os.scandir(f"/proc/{mount.pid}/fd"):
        try:
            target = os.readlink(entry.path)
        except FileNotFoundError:
            continue
        if target == "/":  # the file system of shared memory, which is made when that is needed first
            continue
        if not any(name in target for name in ("kvfuse-tier", "kvfuse-blocks")) and not target.startswith(
            f"{mount.volume}/"
        ):
            descriptors[re.sub(r"\[\d+\]| \(deleted\)|psm_\w+", "", target)] += 1
    lines = Path(f"/proc/{mount.pid}/maps").read_text().splitlines()
    own = "kvfuse-tier", "kvfuse-slabs", "kvfuse-blocks"
    shared = [line for line in lines if re.search(r"/memfd:|/dev/shm/", line)]
    mapped = sum(not any(name in line for name in own) for line in shared)
    return Footprint(registered_things(mount), dict(descriptors), mapped)


def registered_things(mount: KvfuseMount) -> dict[str, int]:
    """What clients have registered, without memory that one of them, a test itself, may still map after its end."""
    return {name: count for name, count in stats(mount)["rings"].items() if name != "charged_bytes"}


def is_within(now: Footprint, before: Footprint) -> bool:
    """Nothing is more than before: a client that was just leaving then may be gone by now."""
    registered, descriptors = Counter(now.registered) - Counter(before.registered), Counter(now.descriptors)
    return not registered and not descriptors - Counter(before.descriptors) and now.mapped <= before.mapped


def has_no_clients(now: Footprint) -> bool:
    return not now.mapped and not any(now.registered.values())


def thread_count(mount: KvfuseMount) -> int:
    return len(os.listdir(f"/proc/{mount.pid}/task"))


def resident_size(mount: KvfuseMount) -> int:
    """Bytes of the daemon's own memory: neither files nor memory shared with clients."""
    found = re.search(r"^RssAnon:\s+(\d+) kB", Path(f"/proc/{mount.pid}/status").read_text(), re.MULTILINE)
    assert found
    return int(found[1]) << 10


@contextmanager
def nothing_left_behind(mount: KvfuseMount) -> Iterator[None]:
    """What clients registered, opened, mapped or started meanwhile is gone at the end. Before, there are none."""
    wait_until(lambda: has_no_clients(footprint(mount)), "the end of the clients before")
    before, threads = footprint(mount), thread_count(mount)
    yield
    try:
        wait_until(lambda: is_within(footprint(mount), before), "the daemon giving back what clients had")
    except AssertionError as error:
        raise AssertionError(f"{error}\nbefore {before}\nafter  {footprint(mount)}\n{mount.log.read_text()}") from None
    assert thread_count(mount) <= threads + IDLE_THREADS_MAX


# -- a client that sends what it likes --------------------------------------------------------------


class RawClient:
    """The control socket, without a check of what is sent. Context manager."""

    def __init__(self, mount: Path, *, hello: bool = True) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(PATIENCE_S)
        self._number = 0
        folder = os.open(mount / ".kvfuse", os.O_PATH)
        try:
            self.socket.connect(f"/proc/self/fd/{folder}/control.sock")
            if hello:
                self.ask(Request.HELLO, VERSION)
        except BaseException:
            self.socket.close()
            raise
        finally:
            os.close(folder)

    def send(self, data: bytes, descriptors: Sequence[int] = ()) -> None:
        rights = array.array("i", descriptors).tobytes()
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if descriptors else []
        self.socket.sendmsg([data], ancillary)

    def receive(self) -> tuple[Message, list[int]]:
        """ConnectionResetError when the daemon hung up."""
        data, descriptors, _, _ = socket.recv_fds(self.socket, MESSAGE_SIZE_MAX, DESCRIPTORS_MAX)
        if not data:
            raise ConnectionResetError("the daemon hung up")
        return Message.unpack(data), list(descriptors)

    def ask(self, request: int, *values: int, descriptors: Sequence[int] = ()) -> tuple[Message, list[int]]:
        self._number += 1
        self.send(Message(request, self._number, values=values).pack(), descriptors)
        return self.receive()

    def handle(self, request: int, *values: int, descriptors: Sequence[int] = ()) -> int:
        """The first value of the reply. OSError."""
        reply, _ = self.ask(request, *values, descriptors=descriptors)
        _raise_if_refused(reply)
        return reply.values[0]

    def error(self, request: int, *values: int, descriptors: Sequence[int] = ()) -> int:
        """The errno of the reply, 0 for none. What came with it is closed."""
        reply, received = self.ask(request, *values, descriptors=descriptors)
        for descriptor in received:
            os.close(descriptor)
        return -reply.status

    def ring(self, entries: int = 64, aux_size: int = 4096) -> RawRing:
        reply, received = self.ask(Request.ADD_RING, entries, aux_size)
        _raise_if_refused(reply)
        return RawRing(reply.values[0], *received)

    def iov(self, size: int) -> tuple[int, int]:
        """(handle, descriptor) of memory that is not sealed."""
        descriptor = os.memfd_create("hostile", os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, size)
        return self.handle(Request.ADD_IOV, size, descriptors=[descriptor]), descriptor

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()


def _raise_if_refused(reply: Message) -> None:
    if reply.status:
        raise OSError(-reply.status, reply.text)


class RawRing:
    """A ring's memory and bells, as they came."""

    def __init__(self, handle: int, memory: int, daemon_bell: int, client_bell: int) -> None:
        self.handle = handle
        self.memory = RingMemory.attach(memory)
        self.daemon_bell = daemon_bell
        self.client_bell = client_bell
        self._descriptors = [memory, daemon_bell, client_bell]

    def close(self) -> None:
        """The descriptors; the memory goes with this object."""
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()


# -- processes --------------------------------------------------------------------------------------


class Process:
    """A program beside this one that answers a line with a line."""

    def __init__(self, program: str, *arguments: object) -> None:
        command = [sys.executable, str(Path(__file__).with_name(program)), *map(str, arguments)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)

    def ask(self, **question: object) -> Any:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the client ended with {self._process.wait()}"
        return json.loads(line)

    def end(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        assert self._process.stdout
        self._process.stdout.close()
        status = self._process.wait(PATIENCE_S)
        assert status == 0, f"a client ended with {status}"

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextmanager
def witness(mount: KvfuseMount, seed: int, slowest: float = SLOWEST_S) -> Iterator[None]:
    """A well-behaved client works all the time, looks at every byte, and must have had no trouble at the end."""
    process = Process("ring_clients.py", "witness", mount.point, seed)
    try:
        process.ask(do="begin")
        yield
        report = process.ask(do="end")
        process.end()
    except BaseException:
        process.kill()
        raise
    print(f"witness: {report}")
    assert report["failures"] == []
    assert report["rounds"] > 0
    assert report["slowest"] < slowest, report
