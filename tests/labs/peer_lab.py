"""Mounts of one volume that read from each other, and a proxy between them that is slow, breaks, or lies."""

from __future__ import annotations

import json
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from mounting import KvfuseMount, shared_conf, temporary_mount, wait_until

from kvfuse.peer.greeting import BLOCKS
from kvfuse.peer.peer_wire import (
    ANSWER,
    ANSWER_MAGIC,
    BLOCK_ANSWER,
    BLOCK_ANSWER_MAGIC,
    BLOCK_QUESTION,
    HEAD,
    HEAD_SIZE,
    QUESTION,
    MessageHead,
    Rows,
)
from kvfuse.peer.queue_pair import PLACE_SIZE
from kvfuse.volume.views.neighbours import Answer
from kvfuse_cluster.etcd import EtcdServers
from kvfuse_cluster.process import free_ports

LINES = ('publish.mode = "relaxed"', 'cache.tier_size = "128MiB"')
HELLO_SIZE, PROOF_SIZE, KIND_OFFSET = 72, 32, 12
PROXY_HOST = "127.0.0.2"
"""where a proxy listens, at the port of its listener"""
PIECE_SIZE = 16 << 10
"""bytes that the proxy sends at once"""


def free_port() -> int:
    """Of the loopback device, where the kernel gives none to outgoing connections; nobody had it a moment ago."""
    return free_ports(1)[0]


# -- mounts -------------------------------------------------------------------------------------------


@contextmanager
def mounted(
    etcd: EtcdServers, words: Sequence[Sequence[str]], lines: Sequence[str] = LINES
) -> Iterator[list[KvfuseMount]]:
    """Mounts of one volume, each with words of its own."""
    with tempfile.TemporaryDirectory(prefix="kvfuse-peers-") as base, ExitStack() as stack:
        source = shared_conf(Path(base), etcd, lines=lines)
        mounts = [stack.enter_context(temporary_mount(words[0], source=source))]
        for number, own in enumerate(words[1:]):
            folder = Path(base) / str(number)
            folder.mkdir()
            other = KvfuseMount(folder, own, source=source)
            stack.callback(other.remove)
            other.mount()
            mounts.append(other)
        yield mounts
        for other in mounts[1:]:
            other.check_unexpected_errors()
            other.unmount()


def listening() -> tuple[str, ...]:
    return (f"peer.listen=127.0.0.1:{free_port()}",)


def stats(mount: KvfuseMount) -> dict[str, Any]:
    return dict(json.loads((mount.point / ".kvfuse/stats").read_text()))


def asked(mount: KvfuseMount) -> dict[str, int]:
    return dict(stats(mount)["peers"]["asked"])


def states(mount: KvfuseMount) -> list[str]:
    return [host["state"] for host in stats(mount)["peers"]["hosts"]]


def wait_for_peers(mounts: Sequence[KvfuseMount]) -> None:
    for mount in mounts:
        wait_until(
            lambda mount=mount: states(mount) == ["connected"] * (len(mounts) - 1), "connections between the hosts"
        )


# -- a proxy ------------------------------------------------------------------------------------------

Sizes = npt.NDArray[np.uint32]
"""of the rows of a question"""
Lie = Callable[[MessageHead, Rows, bytearray], bytes]
"""what is sent instead of an answer: of its head, its rows, and the bytes that follow"""
Noise = Callable[[bytearray], None]
"""changes bytes that pass by"""


class PeerProxy:
    """Between a listener at the port ``target`` and those who think that it is at `PROXY_HOST`. Ends by `close`."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.rate: float | None = None
        """bytes of answers a second"""
        self.lie: Lie | None = None
        self.noise: Noise | None = None
        """of connections that begin now, in both directions"""
        self.flowing = threading.Event()
        """not set: answers stop where they are"""
        self.flowing.set()
        self.is_refusing = False
        self.answers = self.payload = 0
        """answers, and bytes of blocks, that came from the listener"""
        self._listening = socket.create_server((PROXY_HOST, target))
        self._open: list[socket.socket] = []
        self._is_over = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def words(self) -> tuple[str, ...]:
        """For a mount whose readers come through here."""
        return f"peer.listen=127.0.0.1:{self.target}", f"peer.advertise={PROXY_HOST}"

    def be_honest(self) -> None:
        self.lie = self.rate = self.noise = None
        self.is_refusing = False
        self.flowing.set()

    def cut(self) -> None:
        """All connections, now."""
        while self._open:
            _shut(self._open.pop())

    def close(self) -> None:
        self._is_over.set()
        self.flowing.set()
        _shut(self._listening)
        self._listening.close()
        self.cut()

    def _accept(self) -> None:
        while not self._is_over.is_set():
            try:
                caller = self._listening.accept()[0]
            except OSError:
                return
            if self.is_refusing:
                caller.close()
                continue
            threading.Thread(target=self._serve, args=(caller,), daemon=True).start()

    def _serve(self, caller: socket.socket) -> None:
        with caller, suppress(OSError), socket.create_connection(("127.0.0.1", self.target)) as listener:
            self._open += [caller, listener]
            if self.noise is not None:
                _pass_on(caller, listener, self.noise)
                return
            sizes: dict[int, Sizes] = {}
            back: threading.Thread | None = None
            with suppress(OSError):
                hello = exactly(caller, HELLO_SIZE)
                kind = int.from_bytes(hello[KIND_OFFSET : KIND_OFFSET + 4], "little")
                back = threading.Thread(target=self._answer, args=(listener, caller, sizes, kind), daemon=True)
                back.start()
                listener.sendall(hello)
                listener.sendall(exactly(caller, PROOF_SIZE + PLACE_SIZE))
                form = BLOCK_QUESTION if kind == BLOCKS else QUESTION
                while True:
                    head = exactly(caller, HEAD_SIZE)
                    rows = exactly(caller, _parsed(head).row_count * form.itemsize)
                    found = np.frombuffer(rows, form)
                    sizes[_parsed(head).number] = found["length"] if kind == BLOCKS else found["high"] - found["low"]
                    listener.sendall(head + rows)
            _shut(caller)
            _shut(listener)
            if back is not None:
                back.join()

    def _answer(self, listener: socket.socket, caller: socket.socket, sizes: dict[int, Sizes], kind: int) -> None:
        form = BLOCK_ANSWER if kind == BLOCKS else ANSWER
        with suppress(OSError):
            caller.sendall(exactly(listener, HELLO_SIZE + PROOF_SIZE))
            while True:
                head = _parsed(exactly(listener, HEAD_SIZE))
                rows = np.frombuffer(bytearray(exactly(listener, head.row_count * form.itemsize)), form)
                own = sizes[head.number][rows["row"]] if kind == BLOCKS else sizes[head.number]
                data = bytearray(exactly(listener, int(own[rows["answer"] == Answer.HERE].sum())))
                self.answers += 1
                self.payload += len(data)
                self._send(caller, self.lie(head, rows, data) if self.lie else as_answer(head, rows, data))
        _shut(caller)
        _shut(listener)

    def _send(self, caller: socket.socket, data: bytes) -> None:
        for start in range(0, len(data), PIECE_SIZE):
            piece = data[start : start + PIECE_SIZE]
            self.flowing.wait()
            if self.rate is not None:
                self._is_over.wait(len(piece) / self.rate)
            caller.sendall(piece)


@contextmanager
def peer_proxy(target: int | None = None) -> Iterator[PeerProxy]:
    proxy = PeerProxy(target or free_port())
    try:
        yield proxy
    finally:
        proxy.close()


def _pass_on(caller: socket.socket, listener: socket.socket, noise: Noise) -> None:
    """Both ways, until one of them ends."""

    def pump(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := bytearray(source.recv(PIECE_SIZE)):
                noise(data)
                target.sendall(data)
        _shut(source)
        _shut(target)

    back = threading.Thread(target=pump, args=(listener, caller), daemon=True)
    back.start()
    pump(caller, listener)
    back.join()


def _shut(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def exactly(connection: socket.socket, size: int) -> bytes:
    """So many bytes. OSError where there are fewer."""
    data = bytearray()
    while len(data) < size:
        part = connection.recv(min(1 << 20, size - len(data)))
        if not part:
            raise ConnectionResetError
        data += part
    return bytes(data)


def _parsed(head: bytes) -> MessageHead:
    return MessageHead(*HEAD.unpack(head)[1:])


def as_answer(head: MessageHead, rows: Rows, data: bytes | bytearray) -> bytes:
    return head.pack(ANSWER_MAGIC if rows.dtype == ANSWER else BLOCK_ANSWER_MAGIC) + rows.tobytes() + data


def flipped(head: MessageHead, rows: Rows, data: bytearray) -> bytes:
    """One bit of every 4 KiB is another."""
    for place in range(0, len(data), 4096):
        data[place] ^= 1
    return as_answer(head, rows, data)
