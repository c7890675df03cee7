"""What the event loop owes to others when it is interrupted in the middle of calls, or the volume changes there."""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import trio
import trio.testing
from block_calls import put
from volume_lab import MIB, Disk, lab_options, opened

from kvfuse.access.client_process import ClientProcess
from kvfuse.access.namespace_access import NamespaceAccess
from kvfuse.access.namespace_handle import Group, NamespaceHandle
from kvfuse.errors import NotFound, PermissionDenied, Stale
from kvfuse.usrbio.daemon.block_calls import BlockCalls
from kvfuse.usrbio.daemon.call import Call, Completion, Entry
from kvfuse.usrbio.daemon.call_memory import Share, SharedPool
from kvfuse.usrbio.daemon.jobs import Jobs
from kvfuse.usrbio.daemon.loop_calls import Calls
from kvfuse.usrbio.daemon.registered_things import OpenFile
from kvfuse.usrbio.protocol.wire import Flag, Op
from kvfuse.volume.api import ROOT_INODE, Attributes, Caller, Changes, Numbers
from kvfuse.volume.inodes.handle import FileHandle
from kvfuse.volume.measures.gates import Gates
from kvfuse.volume.views.ancestors import Ancestors
from kvfuse.volume.views.content_map import ContentMap
from kvfuse.volume.volume import Volume

INODE = 1234


class StuckVolume:
    """Of two writes the second is done together with others, and the first never ends."""

    seal = None

    def __init__(self) -> None:
        self.files = self

    async def write_in_slots(self, handle: object, offsets: Numbers, lengths: Numbers, source: object) -> Numbers:
        return np.array([1])

    async def write(self, handle: object, offset: int, data: memoryview) -> int:
        await trio.sleep_forever()
        raise AssertionError("it sleeps for ever")


class IdleWorker:
    """A ring whose thread does what it is told at once."""

    stopped = False

    def __init__(self) -> None:
        self.completed: list[Call] = []
        self.jobs: Any = self
        self.completions = self

    def run_here(self, job: Callable[[], None]) -> bool:
        job()
        return True

    def complete_many(self, rows: list[tuple[Call, int]]) -> None:
        self.completed += [call for call, _ in rows]

    def give_up(self, call: Call, number: int, then: Callable[[], object] = lambda: None) -> None:
        then()


async def test_the_kernel_hears_of_what_was_written_although_its_neighbour_is_cancelled() -> None:
    """A client dies while one of its writes waits: the others changed bytes that the kernel may have cached."""
    dropped: list[int] = []
    worker: Any = IdleWorker()
    kernel: Any = SimpleNamespace(drop_content=dropped.append)
    volume: Any = StuckVolume()
    file = OpenFile(None, INODE, True, True, ContentMap(INODE, 4096, 0))
    async with trio.open_nursery() as nursery:
        calls = Calls(volume, kernel, ClientProcess(1, 0, 0, frozenset()), nursery, Share(SharedPool(1 << 20)))
        writes = [
            Call(
                worker,
                Entry(Op.WRITE, 0, 0, 1, 1, 0, number, 0, 1, 0, number, 0, 0),
                float("inf"),
                file=file,
                data=b"x",
            )
            for number in range(2)
        ]
        calls.start(writes)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert INODE in dropped
    assert writes[1] in worker.completed


class PuttingVolume:
    """Puts are done at once, but for those of ``stuck`` names, which wait until they are let go."""

    seal = None

    rows = None

    def __init__(self, *stuck: bytes) -> None:
        self.blocks = self.inodes = self.search = self
        self.gates = Gates()
        self.begun: list[bytes] = []
        self.stuck = {name: trio.Event() for name in stuck}

    async def gate(self, ino: int) -> None:
        return None

    async def ancestors(self, directory: int) -> tuple[Ancestors, list[Attributes]]:
        return self.gates.ancestors.settle(directory, ()), []

    async def attributes(self, ino: int) -> SimpleNamespace:
        return SimpleNamespace(ino=ino, uid=0, gid=0, mode=0o40755)

    def waits(self, directory: int) -> bool:
        return False

    def terms(self, directory: int) -> tuple[bool, None]:
        return False, None

    async def put(self, directory: int, name: bytes, *_: object) -> int:
        self.begun.append(name)
        if name in self.stuck:
            await self.stuck[name].wait()
        return 0


class PutWorker(IdleWorker):
    """A ring that notes what was given up."""

    def __init__(self) -> None:
        super().__init__()
        self.given_up: list[bytes] = []
        self.reasons: set[int] = set()

    def run_here(self, job: Callable[[], None]) -> bool:
        return not self.stopped and super().run_here(job)

    def give_up(self, call: Call, number: int, then: Callable[[], object] = lambda: None) -> None:
        if not call.ended:
            self.given_up.append(call.names[0])
            self.reasons.add(number)
        call.ended = True
        then()

    def complete(self, call: Call, result: int) -> None:
        assert (call.entry.op, result) == (Op.CANCEL, 0)

    @property
    def names(self) -> list[bytes]:
        return [call.names[0] for call in self.completed]


class BusyWorker(PutWorker):
    """A ring whose thread has not done yet what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[Callable[[], None]] = []

    def run_here(self, job: Callable[[], None]) -> bool:
        self.given.append(job)
        return True


def puts_of(ring: Any, names: str, deadline: float = float("inf")) -> list[Call]:
    namespace = NamespaceHandle(ROOT_INODE, 0o644, Group(0))
    return [
        Call(
            ring,
            Entry(Op.PUT, 0, 0, 1, 1, 1, 0, 0, 1, 0, ord(name), 0, 0),
            deadline,
            namespace=namespace,
            names=(name.encode(),),
            data=b"x",
        )
        for name in names
    ]


def cancel_of(ring: Any, name: str) -> Call:
    return Call(ring, Entry(Op.CANCEL, 0, 0, 0, 0, 0, ord(name), 0, 0, 0, 0, 0, 0), float("inf"))


@contextlib.asynccontextmanager
async def calls_of(volume: Any) -> AsyncIterator[Calls]:
    kernel: Any = SimpleNamespace(drop_name=lambda *_: None, drop_attributes=lambda *_: None)
    async with trio.open_nursery() as nursery:
        yield Calls(volume, kernel, ClientProcess(1, 0, 0, frozenset()), nursery, Share(SharedPool(1 << 20)))
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()


async def test_puts_that_end_before_their_ring_thread_runs_wake_it_once() -> None:
    volume, first, second = PuttingVolume(), BusyWorker(), BusyWorker()
    async with calls_of(volume) as calls:
        calls.start(puts_of(first, "abcd"))
        calls.start(puts_of(second, "ef"))
        calls.start(puts_of(first, "gh"))
    assert (len(first.given), len(second.given)) == (1, 1)
    for worker in (first, second):
        worker.given[0]()
    assert (sorted(first.names), sorted(second.names)) == ([b"a", b"b", b"c", b"d", b"g", b"h"], [b"e", b"f"])


async def test_puts_do_not_wait_for_one_that_waits() -> None:
    """Nor for those that wait after it; and rings hear of those that are done."""
    volume, worker = PuttingVolume(b"b", b"d"), PutWorker()
    async with calls_of(volume) as calls:
        calls.start(puts_of(worker, "abcde"))
        await trio.testing.wait_all_tasks_blocked()
        assert sorted(worker.names) == [b"a", b"c", b"e"]
        calls.start(puts_of(worker, "fg"))
        await trio.testing.wait_all_tasks_blocked()
        assert sorted(worker.names) == [b"a", b"c", b"e", b"f", b"g"]
        volume.stuck[b"d"].set()
        await trio.testing.wait_all_tasks_blocked()
        calls.start(puts_of(worker, "hi"))
        await trio.testing.wait_all_tasks_blocked()
        volume.stuck[b"b"].set()
        await trio.testing.wait_all_tasks_blocked()
    assert [worker.names[5], worker.names[-1]] == [b"d", b"b"]
    assert sorted(worker.names[6:-1]) == [b"h", b"i"]


@pytest.mark.parametrize("cancelled", ["b", "c", "bc"])
async def test_a_cancelled_put_leaves_the_others_alone(cancelled: str) -> None:
    volume, worker = PuttingVolume(b"b", b"c"), PutWorker()
    async with calls_of(volume) as calls:
        calls.start(puts_of(worker, "abcd"))
        await trio.testing.wait_all_tasks_blocked()
        for name in cancelled:
            calls.cancel([cancel_of(worker, name)])
        await trio.testing.wait_all_tasks_blocked()
        for stuck in volume.stuck.values():
            stuck.set()
    assert b"".join(worker.given_up).decode() == cancelled
    assert sorted(volume.begun) == [b"a", b"b", b"c", b"d"]
    assert sorted(worker.names) == [name.encode() for name in "abcd" if name not in cancelled]


async def test_a_put_that_is_cancelled_before_its_task_runs_is_never_begun() -> None:
    volume, worker = PuttingVolume(), PutWorker()
    async with calls_of(volume) as calls:
        calls.start(puts_of(worker, "abcd"))
        calls.cancel([cancel_of(worker, "c")])
    assert worker.given_up == [b"c"]
    assert sorted(volume.begun) == [b"a", b"b", b"d"]


@pytest.mark.parametrize("late", ["b", "c", "bc", "bcd"])
async def test_a_put_is_given_up_at_its_deadline(late: str, autojump_clock: trio.testing.MockClock) -> None:
    volume, worker = PuttingVolume(b"b", b"c", b"d"), PutWorker()
    async with calls_of(volume) as calls:
        deadline = time.monotonic() + 5.0
        for name in "abcde":
            calls.start(puts_of(worker, name, deadline if name in late else float("inf")))
        await trio.sleep(4.0)
        assert worker.given_up == []
        await trio.sleep(2.0)
        assert b"".join(sorted(worker.given_up)).decode() == late
        for stuck in volume.stuck.values():
            stuck.set()
    assert worker.reasons == {errno.ETIMEDOUT}
    assert sorted(volume.begun) == [b"a", b"b", b"c", b"d", b"e"]
    assert sorted(worker.names) == [name.encode() for name in "abcde" if name not in late]


async def test_puts_of_a_ring_that_stopped_are_not_begun() -> None:
    """Those of another one of the same client are."""
    volume, stopping, other = PuttingVolume(), PutWorker(), PutWorker()
    async with calls_of(volume) as calls:
        calls.start(puts_of(stopping, "abc"))
        calls.start(puts_of(other, "de"))
        stopping.stopped = True
        calls.cancel_ring(cast(Any, stopping))
    assert sorted(volume.begun) == sorted(other.names) == [b"d", b"e"]


async def test_puts_that_wait_end_with_their_ring() -> None:
    volume, stopping, other = PuttingVolume(b"b"), PutWorker(), PutWorker()
    async with calls_of(volume) as calls:
        calls.start(puts_of(stopping, "abc"))
        await trio.testing.wait_all_tasks_blocked()
        stopping.stopped = True
        calls.cancel_ring(cast(Any, stopping))
        await trio.testing.wait_all_tasks_blocked()
        calls.start(puts_of(other, "de"))
    assert sorted(volume.begun) == [b"a", b"b", b"c", b"d", b"e"]
    assert sorted(stopping.names) == [b"a", b"c"]
    assert sorted(other.names) == [b"d", b"e"]


class AwaitedWorker(IdleWorker):
    """A ring whose thread does what it is told when the test says so."""

    def __init__(self, answers: list[bool]) -> None:
        super().__init__()
        self.given, self.waiting = trio.open_memory_channel[Callable[[], None]](1)
        self.results: list[int] = []
        self.answers = answers
        self.in_turn = None

    def _append(self, _: object, job: Callable[[], None]) -> bool:
        self.given.send_nowait(job)
        return True

    ask_thread = Jobs.ask_thread

    def attempt(self, call: Call, attempt: Callable[[Call], Completion | None]) -> bool:
        return attempt(call) is not None

    def complete(self, call: Call, result: int, offset: int = 0) -> None:
        self.results.append(result)


def get_of(ring: Any, namespace: NamespaceHandle, name: bytes) -> Call:
    def again(call: Call) -> Completion | None:
        return Completion(0) if ring.answers.pop(0) else None

    entry = Entry(Op.GET, 0, Flag.VIEW, 1, 0, len(name), 0, 0, 0, 0, 1, 0, 0)
    return Call(ring, entry, float("inf"), namespace=namespace, names=(name,), again=again)


class NoDevices:
    async def answer_found(self, call: Call) -> bool:
        return False


def block_calls(volume: Volume) -> BlockCalls:
    nothing, devices = cast(Any, None), cast(Any, NoDevices())
    return BlockCalls(volume, NamespaceAccess(volume, ClientProcess(1, 0, 0, frozenset())), nothing, nothing, devices)


async def test_a_get_of_a_name_that_means_another_block_meanwhile_is_of_that_one() -> None:
    """Not refused with the size of the one that is gone, where there is no buffer but may be a view."""
    options = lab_options(capacity=16 * MIB)
    answers = [False, True]
    worker: Any = AwaitedWorker(answers)
    async with opened(Disk.format(options), options) as volume, trio.open_nursery() as nursery:
        await put(volume, b"a", b"old")
        nursery.start_soon(block_calls(volume).get, get_of(worker, NamespaceHandle(ROOT_INODE, 0o644, Group(0)), b"a"))
        job = await worker.waiting.receive()
        await put(volume, b"a", b"new")
        job()
        (await worker.waiting.receive())()
    assert (answers, worker.results) == ([], [])


@pytest.mark.parametrize("operation", ["get", "exists", "prefetch"])
async def test_who_loses_the_right_while_a_block_is_looked_for_is_refused(
    operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was found may have been stored since."""
    options = lab_options(capacity=16 * MIB)
    nothing: Any = None
    async with opened(Disk.format(options), options) as volume:
        folder = await volume.tree.make_directory(ROOT_INODE, b"folder", 0o755, Caller(0, 0))
        await volume.blocks.put(folder.ino, b"a", memoryview(b"bytes"), Caller(0, 0), 0o644)
        looks = {"get": "bind", "exists": "exists", "prefetch": "prefetch"}[operation]
        look, looked = getattr(volume.blocks, looks), list[str]()

        async def close_meanwhile(*arguments: Any) -> Any:
            found = await look(*arguments)
            looked.append(operation)
            await volume.inodes.set_attributes(ROOT_INODE, Changes(mode=0o700), Caller(0, 0))
            return found

        admission = NamespaceAccess(volume, ClientProcess(1, 5, 5, frozenset()))
        calls = BlockCalls(volume, admission, nothing, nothing, nothing)
        namespace = NamespaceHandle(folder.ino, 0o644, Group(0), by_path=await admission.may_reach(folder.ino))
        assert namespace.by_path
        worker: Any = AwaitedWorker([])
        with monkeypatch.context() as patch:
            patch.setattr(volume.blocks, looks, close_meanwhile)
            with pytest.raises(PermissionDenied):
                await getattr(calls, operation)(get_of(worker, namespace, b"a"))
        assert looked == [operation]
        assert not namespace.bindings
        assert worker.results == []


async def test_a_get_of_what_another_host_took_away_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    options = lab_options(capacity=16 * MIB)
    asked: list[int] = []

    async def gone(ino: int, flags: int, caller: Caller) -> FileHandle:
        asked.append(ino)
        raise Stale(f"inode {ino} was removed")

    worker: Any = AwaitedWorker([])
    async with opened(Disk.format(options), options) as volume:
        await put(volume, b"a", b"old")
        with monkeypatch.context() as patch:
            patch.setattr(volume.files, "open", gone)
            with pytest.raises(NotFound):
                await block_calls(volume).get(get_of(worker, NamespaceHandle(ROOT_INODE, 0o644, Group(0)), b"a"))
    assert len(asked) == 2
