"""What a client is answered where the daemon has no thread to look at the descriptor that it sent."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from errno import EBADF, ETIMEDOUT
from pathlib import Path
from typing import Any

import pytest
import trio
from volume_lab import MIB, Disk, lab_options, opened

from kvfuse.usrbio.daemon import descriptor_receiver, penalty
from kvfuse.usrbio.daemon.listener import serve_rings
from kvfuse.usrbio.protocol.wire import MESSAGE_SIZE_MAX, VERSION, Message, Request

PATIENCE_S = 20.0


class Asking:
    """A client that looks at every message that comes."""

    def __init__(self, stream: trio.socket.SocketType) -> None:
        self._stream = stream

    async def ask(self, request: Request, number: int, value: int, descriptor: int | None = None) -> Message:
        data = Message(request, number, values=(value,)).pack()
        if descriptor is None:
            await self._stream.send(data)
        else:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptor.to_bytes(4, "little"))]
            await self._stream.sendmsg([data], rights)
        with trio.fail_after(PATIENCE_S):
            return Message.unpack(await self._stream.recv(MESSAGE_SIZE_MAX))

    async def has_ended(self) -> bool:
        with trio.fail_after(PATIENCE_S):
            return not await self._stream.recv(MESSAGE_SIZE_MAX)


@asynccontextmanager
async def asking(folder: Path, count: int = 1) -> AsyncIterator[list[Asking]]:
    """Clients of a daemon without a mount."""
    kernel: Any = None
    options = lab_options(capacity=16 * MIB)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener, ExitStack() as streams:
        listener.bind(str(folder / "socket"))
        listener.listen()
        listener.setblocking(False)
        async with opened(Disk.format(options), options) as volume, trio.open_nursery() as nursery:
            await nursery.start(serve_rings, volume, listener, kernel, 0)
            clients = []
            for _ in range(count):
                stream = streams.enter_context(trio.socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                await stream.connect(str(folder / "socket"))
                clients.append(Asking(stream))
                assert (await clients[-1].ask(Request.HELLO, 1, VERSION)).status == 0
            yield clients
            nursery.cancel_scope.cancel()


@pytest.fixture
def memory() -> Iterator[int]:
    descriptor = os.memfd_create("memory")
    os.ftruncate(descriptor, 4096)
    yield descriptor
    os.close(descriptor)


async def check_one_answer_each(client: Asking, memory: int, let_go: Callable[[], object]) -> None:
    """Each request is answered once, the refused one, too, and with its own number."""
    refused = await client.ask(Request.ADD_IOV, 2, 4096, memory)
    assert (refused.number, refused.status) == (2, -ETIMEDOUT)
    let_go()
    other = await client.ask(Request.DROP_IOV, 3, 12345)
    assert other.number == 3
    assert (await client.ask(Request.ADD_IOV, 4, 4096, memory)).number == 4


async def test_a_request_whose_user_has_no_receiver_left_is_refused_once(
    tmp_path: Path, memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()
    monkeypatch.setattr(descriptor_receiver, "USER_THREADS_MAX", 1)
    monkeypatch.setattr(descriptor_receiver, "SECONDS", 0.3)
    async with asking(tmp_path, 2) as (stuck, client):
        with monkeypatch.context() as patch:
            patch.setattr(descriptor_receiver, "seal_memory", lambda _: goes_on.wait(PATIENCE_S))
            late = await stuck.ask(Request.ADD_IOV, 1, 4096, memory)
            assert late.status == -ETIMEDOUT
        await check_one_answer_each(client, memory, goes_on.set)
        assert (await stuck.ask(Request.ADD_IOV, 2, 4096, memory)).status == 0


async def test_a_machine_without_threads_refuses_and_goes_on(
    tmp_path: Path, memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start
    monkeypatch.setattr(descriptor_receiver, "SECONDS", 0.3)

    def start_or_not(thread: threading.Thread) -> None:
        if thread.name == descriptor_receiver.THREAD_NAME:
            raise RuntimeError("can't start new thread")
        start(thread)

    async with asking(tmp_path) as [client]:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start_or_not)
            await check_one_answer_each(client, memory, patch.undo)


async def test_a_client_whose_messages_are_all_refused_is_disconnected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others go on meanwhile. One that is right as often as not stays."""
    monkeypatch.setattr(penalty, "FREE", 8)
    monkeypatch.setattr(penalty, "BOUND", 16)
    monkeypatch.setattr(penalty, "LAST_SECONDS", 0.001)
    async with asking(tmp_path, 2) as (bad, client):
        for number in range(17):
            assert (await bad.ask(Request.DROP_RING, number, 12345)).status == -EBADF
            assert (await client.ask(Request.DROP_RING, 2 * number, 12345)).status == -EBADF
            added = await client.ask(Request.ADD_RING, 2 * number + 1, 8)
            assert added.status == 0
            assert (await client.ask(Request.DROP_RING, 2 * number + 2, added.values[0])).status == 0
        assert await bad.has_ended()
        assert (await client.ask(Request.ADD_RING, 100, 8)).status == 0
