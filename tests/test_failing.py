"""What becomes of an exception in the core, in a service, and in what is done once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NoReturn, cast

import pytest
import trio
import trio.testing

from kvfuse import failing
from kvfuse.errors import MountError
from kvfuse.fs.doors import Service, run_services


class Ended(BaseException):
    """This process has ended."""


@pytest.fixture
def ends() -> Iterator[list[BaseException]]:
    """The reasons for which this process would have ended."""
    reasons: list[BaseException] = []

    def end(error: BaseException) -> NoReturn:
        reasons.append(error)
        raise Ended

    failing.end_by(end)
    yield reasons
    failing.end_by(None)


async def fail(error: BaseException) -> None:
    raise error


async def test_the_core_ends_the_process_before_anything_is_unwound(ends: list[BaseException]) -> None:
    unwound: list[list[BaseException]] = []

    async def beside() -> None:
        try:
            await trio.sleep_forever()
        finally:
            unwound.append(list(ends))

    mistake = RuntimeError("a mistake")
    with pytest.RaisesGroup(Ended):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(beside)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(failing.vital_task, fail, mistake)
    assert ends == [mistake]
    assert unwound == [[mistake]]


async def test_a_cancellation_is_no_failure(ends: list[BaseException]) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(failing.vital_task, trio.sleep_forever)
        nursery.start_soon(failing.service, "cancelled", trio.sleep_forever)
        nursery.start_soon(failing.once, "cancelled", trio.sleep_forever)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert ends == []
    assert failing.failures["cancelled"] == 0


def test_a_thread_is_of_the_core(ends: list[BaseException]) -> None:
    mistake = RuntimeError("a mistake")

    def work() -> None:
        raise mistake

    hook = threading.excepthook

    def caught(raised: threading.ExceptHookArgs) -> None:
        with pytest.raises(Ended):
            hook(raised)

    threading.excepthook = caught
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert ends == [mistake]


async def test_where_no_daemon_follows_an_exception_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        await failing.vital_task(fail, ZeroDivisionError())


async def test_a_service_is_begun_anew_with_pauses_that_grow(
    ends: list[BaseException], autojump_clock: trio.testing.MockClock
) -> None:
    starts: list[float] = []

    async def work() -> None:
        starts.append(trio.current_time())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            if len(starts) == 15:
                await trio.sleep(failing.PROVEN_SECONDS + 1)
            if len(starts) == 17:
                nursery.cancel_scope.cancel()
                return
            nursery.start_soon(fail, OSError("a mistake"))

    await failing.service("grows", work)
    pauses = [after - before for before, after in pairwise(starts)]
    expected = [min(failing.PAUSE_MIN * 2**number, failing.PAUSE_MAX) for number in range(14)]
    assert pauses[:14] == pytest.approx(expected)
    assert pauses[14:] == pytest.approx([failing.PROVEN_SECONDS + 1 + failing.PAUSE_MIN, 2 * failing.PAUSE_MIN])
    assert failing.failures["grows"] == 16
    assert ends == []


async def test_what_is_done_once_is_counted() -> None:
    await failing.once("once", fail, KeyError("a mistake"))
    assert failing.failures["once"] == 1


async def test_a_mount_hears_of_a_service_that_cannot_begin_and_a_takeover_does_not(
    autojump_clock: trio.testing.MockClock,
) -> None:
    tries: list[float] = []
    begun = trio.Event()

    async def serve(_: object, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        tries.append(trio.current_time())
        if len(tries) < 4:
            raise MountError("the port is in use")
        task_status.started()
        begun.set()
        if len(tries) == 4:
            raise RuntimeError("later")

    services = [Service("port", cast(Any, serve))]
    with pytest.RaisesGroup(MountError):
        async with run_services(services, cast(Any, None), must_begin=True):
            pytest.fail("it was begun")
    assert len(tries) == 1
    async with run_services(services, cast(Any, None), must_begin=False):
        await begun.wait()
        await trio.sleep(1)
    assert len(tries) == 5
    tries[:] = [0.0] * 3
    async with run_services(services, cast(Any, None), must_begin=True):
        await trio.sleep(1)  # it failed after it had begun: that is no error of the mount
    assert len(tries) == 5
