"""A request whose answer the kernel never got is sent again, and its change is there once, wherever it was cut off."""

from __future__ import annotations

import errno
import os
import random
import stat
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pyfuse3
import pytest
import trio
from handover_lab import ROOT, WHO, Daemon, Mount, fh_of
from volume_lab import Chaos, lab_options

from kvfuse.volume.api import RENAME_EXCHANGE, RENAME_NOREPLACE

pytestmark = pytest.mark.ring(1)

STEPS = 60
"""of all tasks, after most of which a request is answered"""


class KillAfter(trio.abc.Instrument):
    """Kill the daemon of a mount when its tasks have done so many steps."""

    def __init__(self, mount: Mount, steps: int) -> None:
        self.mount, self.steps = mount, steps

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        self.steps -= 1
        if not self.steps:
            self.mount.kill()


@dataclass
class Case:
    """One kind of request, and what holds before and after. ``inos``: of what `prepare` made."""

    kind: str
    args: Callable[[dict[bytes, int]], tuple[Any, ...]]
    gone: tuple[bytes, ...] = ()
    made: tuple[bytes, ...] = ()
    means: tuple[tuple[bytes, bytes], ...] = ()
    """(name, the name that its inode had before)"""


CASES = {
    "create": Case("create", lambda _: (ROOT, b"new", 0o644, os.O_RDWR | os.O_CREAT | os.O_EXCL, WHO), made=(b"new",)),
    "mkdir": Case("mkdir", lambda _: (ROOT, b"new", 0o755, WHO), made=(b"new",)),
    "mknod": Case("mknod", lambda _: (ROOT, b"new", stat.S_IFIFO | 0o644, 0, WHO), made=(b"new",)),
    "symlink": Case("symlink", lambda _: (ROOT, b"new", b"target", WHO), made=(b"new",)),
    "link": Case("link", lambda inos: (inos[b"a"], ROOT, b"new", WHO), means=((b"new", b"a"), (b"a", b"a"))),
    "unlink": Case("unlink", lambda _: (ROOT, b"a", WHO), gone=(b"a",)),
    "rmdir": Case("rmdir", lambda _: (ROOT, b"d", WHO), gone=(b"d",)),
    "rename": Case("rename", lambda _: (ROOT, b"a", ROOT, b"new", 0, WHO), gone=(b"a",), means=((b"new", b"a"),)),
    "rename over": Case("rename", lambda _: (ROOT, b"a", ROOT, b"b", 0, WHO), gone=(b"a",), means=((b"b", b"a"),)),
    "rename folder": Case("rename", lambda _: (ROOT, b"d", ROOT, b"e", 0, WHO), gone=(b"d",), means=((b"e", b"d"),)),
    "exchange": Case(
        "rename", lambda _: (ROOT, b"a", ROOT, b"d", RENAME_EXCHANGE, WHO), means=((b"a", b"d"), (b"d", b"a"))
    ),
    "noreplace": Case(
        "rename", lambda _: (ROOT, b"a", ROOT, b"new", RENAME_NOREPLACE, WHO), gone=(b"a",), means=((b"new", b"a"),)
    ),
}
NAMES = (b"a", b"b", b"d", b"e", b"new")


async def prepare(daemon: Daemon) -> dict[bytes, int]:
    """Two files and two folders."""
    inos = {}
    for name in (b"a", b"b"):
        fh, inos[name] = await daemon.create(name)
        await daemon.ask("write", fh, 0, b"content of " + name)
        await daemon.ask("release", fh)
    for name in (b"d", b"e"):
        inos[name] = int((await daemon.ask("mkdir", ROOT, name, 0o755, WHO)).st_ino)
    await daemon.volume.sync()
    return inos


async def ask_and_kill(daemon: Daemon, ask: Callable[[], Awaitable[Any]], steps: int) -> None:
    """The daemon dies so many steps after it was asked, or when it has the answer that the kernel will not get."""
    killer = KillAfter(daemon.mount, steps)
    trio.lowlevel.add_instrument(killer)
    try:
        await ask()
    finally:
        trio.lowlevel.remove_instrument(killer)
    if killer.steps > 0:
        daemon.mount.kill()


def slow(chance: random.Random) -> Chaos:
    return Chaos(random.Random(chance.random()), delay=chance.choice([0.0, 0.3]))


async def ask_again(daemon: Daemon, case: Case, inos: dict[bytes, int], sent: list[int]) -> Any:
    """As the kernel does. ``sent``: numbers of requests."""
    return await daemon.ask(case.kind, *case.args(inos), again=sent[-1])


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("shared", [False, True])
async def test_it_is_done_once(name: str, strict: bool, shared: bool, autojump_clock: trio.abc.Clock) -> None:
    for seed in range(6 if shared else 12):
        print("seed", seed)
        await once(name, random.Random(seed), Mount(lab_options(strict=strict), shared=shared))


async def once(name: str, chance: random.Random, mount: Mount) -> None:
    case = CASES[name]
    async with mount.daemon() as daemon:
        inos = await prepare(daemon)
        await ask_and_kill(daemon, lambda: daemon.ask(case.kind, *case.args(inos)), chance.randint(1, STEPS))
        sent = [mount.unique]
    for _ in range(chance.randint(0, 2)):  # not even the second time
        async with mount.daemon(slow(chance)) as daemon:
            await ask_and_kill(daemon, lambda: ask_again(daemon, case, inos, sent), chance.randint(1, STEPS))
    async with mount.daemon() as daemon:
        answer = await ask_again(daemon, case, inos, sent)
        meant = {one: await daemon.lookup(one) for one in NAMES}
        assert not any(meant[one] for one in case.gone), meant
        assert all(meant[one] == inos[was] for one, was in case.means), meant
        if case.made:
            entry = answer[1] if isinstance(answer, tuple) else answer
            assert entry.st_ino == meant[case.made[0]] != 0
        touched = {*case.gone, *case.made, *[one for one, _ in case.means], b"new"}
        assert all(meant[one] == inos[one] for one in NAMES if one not in touched)
        if name == "create":
            fh = fh_of(answer[0])
            assert await daemon.ask("write", fh, 0, b"bytes") == 5
            await daemon.ask("release", fh)
        assert len(daemon.operations._open) == 0
        assert daemon.operations.unexpected_error_count == 0
    await mount.check()


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("shared", [False, True])
async def test_a_lock_file_is_made_by_one(strict: bool, shared: bool, autojump_clock: trio.abc.Clock) -> None:
    """Two want to make it when the daemon is killed; both are sent again, in any order."""
    for seed in range(10 if shared else 40):
        print("seed", seed)
        chance = random.Random(seed)
        mount = Mount(lab_options(strict=strict), shared=shared)
        made: list[int] = []

        async def want(daemon: Daemon, made: list[int], **again: int) -> None:
            try:
                _, ino = await daemon.create(b"lock", **again)
            except pyfuse3.FUSEError as error:
                assert error.errno == errno.EEXIST
            else:
                made.append(ino)

        async with mount.daemon(slow(chance)) as daemon:

            async def both(daemon: Daemon = daemon) -> None:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(want, daemon, [])
                    nursery.start_soon(want, daemon, [])

            await ask_and_kill(daemon, both, chance.randint(1, STEPS))
            last = mount.unique
        async with mount.daemon() as daemon:
            for number in chance.sample([last - 2, last], 2):
                await want(daemon, made, again=number)
            assert made == [await daemon.lookup(b"lock")]
        await mount.check()


async def test_what_others_made_meanwhile_stays() -> None:
    """The name that a request removed has another file by the time that it is sent again."""
    for kind, args in (
        ("unlink", (ROOT, b"a", WHO)),
        ("rename", (ROOT, b"a", ROOT, b"b", 0, WHO)),
    ):
        mount = Mount(lab_options(strict=True))
        async with mount.daemon() as daemon:
            await prepare(daemon)
            await daemon.ask(kind, *args)
            number = mount.unique
            mount.kill()
        async with mount.daemon() as daemon:
            _, other = await daemon.create(b"a")
            await daemon.ask(kind, *args, again=number)
            assert await daemon.lookup(b"a") == other


async def test_an_error_is_told_again() -> None:
    mount = Mount()
    async with mount.daemon() as daemon:
        inos = await prepare(daemon)
        numbers = []
        for kind, *args in (("mkdir", ROOT, b"a", 0o755, WHO), ("unlink", ROOT, b"new", WHO)):
            with pytest.raises(pyfuse3.FUSEError):
                await daemon.ask(str(kind), *args)
            numbers.append(mount.unique)
        mount.kill()
    async with mount.daemon() as daemon:
        with pytest.raises(pyfuse3.FUSEError) as caught:
            await daemon.ask("mkdir", ROOT, b"a", 0o755, WHO, again=numbers[0])
        assert caught.value.errno == errno.EEXIST
        with pytest.raises(pyfuse3.FUSEError) as caught:
            await daemon.ask("unlink", ROOT, b"new", WHO, again=numbers[1])
        assert caught.value.errno == errno.ENOENT
        assert await daemon.lookup(b"a") == inos[b"a"]


async def test_an_attribute_is_removed_once() -> None:
    mount = Mount(lab_options(strict=True))
    async with mount.daemon() as daemon:
        inos = await prepare(daemon)
        await daemon.ask("setxattr", inos[b"a"], b"user.x", b"1", WHO)
        await daemon.ask("removexattr", inos[b"a"], b"user.x", WHO)
        number = mount.unique
        with pytest.raises(pyfuse3.FUSEError):
            await daemon.ask("removexattr", inos[b"a"], b"user.y", WHO)
        mount.kill()
    async with mount.daemon() as daemon:
        assert await daemon.lookup(b"a") == inos[b"a"]
        await daemon.ask("removexattr", inos[b"a"], b"user.x", WHO, again=number)
        with pytest.raises(pyfuse3.FUSEError):
            await daemon.ask("removexattr", inos[b"a"], b"user.y", WHO, again=number + 2)


@pytest.mark.parametrize("is_stored", [False, True])
async def test_an_append_is_there_once(is_stored: bool) -> None:
    mount = Mount(keeps=False)
    async with mount.daemon() as daemon:
        inos = await prepare(daemon)
        fh = await daemon.open(inos[b"a"], os.O_RDWR | os.O_APPEND)
        await daemon.ask("write", fh, 12, b" and more")
        number = mount.unique
        if is_stored:
            await daemon.volume.sync()
        mount.kill()
    async with mount.daemon() as daemon:
        again = daemon.ask("write", fh, 12, b" and more", again=number)
        if is_stored:
            assert await again == 9
        else:
            with pytest.raises(pyfuse3.FUSEError):  # bytes are lost, as far as anybody knows
                await again
            with pytest.raises(pyfuse3.FUSEError):
                await daemon.ask("fsync", fh, False)
            await daemon.ask("write", fh, 12, b" and more")
        assert await daemon.ask("read", fh, 0, 100) == b"content of a and more"
        await daemon.ask("release", fh)


async def test_appends_go_to_the_end_that_is_stored() -> None:
    """The kernel still thinks that the file is as long as it was."""
    mount = Mount(keeps=False)
    async with mount.daemon() as daemon:
        inos = await prepare(daemon)
        fh = await daemon.open(inos[b"a"], os.O_RDWR | os.O_APPEND)
        await daemon.ask("write", fh, 12, b" and what is lost")
        mount.kill()
    async with mount.daemon() as daemon:
        with pytest.raises(pyfuse3.FUSEError):
            await daemon.ask("fsync", fh, False)
        await daemon.ask("write", fh, 29, b" and more")
        assert await daemon.ask("read", fh, 0, 100) == b"content of a and more"
        await daemon.ask("release", fh)
    await mount.check()
