"""The engine `block` on NVMe devices of another machine: what it knows of them, and what it does when they fail.

In the machine of scripts/rdma-vm, where `test_virtual_machine` runs this.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from click.testing import CliRunner
from nvmeof_lab import Host, Target, nodes_of

from kvfuse.cli import cli
from kvfuse.errors import EngineError, EngineFull
from kvfuse.remote.segments.api import Transfer
from kvfuse.remote.segments.block.making import make_set
from kvfuse.remote.segments.block.store import BlockSegments

MIB = 1 << 20
VOLUME = b"fault" * 3 + b"!"
PAGE = 16 << 10
DEADLINE = 20.0
"""longer than the kernel keeps calls"""
SLACK = 30.0
"""what a busy machine may add"""
PATIENCE = 300.0


@pytest.fixture
def hosts(fabric: Target) -> Iterator[tuple[Host, Host]]:
    """One by TCP and one by RDMA, on new segments."""
    number = len(fabric.hosts)
    pair = fabric.connect(f"near {number}", "tcp"), fabric.connect(f"far {number}", "rdma")
    make_set([pair[0].device], VOLUME, 4 * MIB, MIB, 4, replace=True)
    yield pair
    for host in pair:
        host.disconnect()


@asynccontextmanager
async def opened(host: Host) -> AsyncIterator[BlockSegments]:
    store = await BlockSegments.open([host.device], VOLUME, deadline=DEADLINE)
    yield store
    await store.aclose()


async def read(store: BlockSegments, offset: int = 0, length: int = PAGE) -> bytes:
    buffer = bytearray(length)
    await store.read([Transfer(1, offset, buffer)])
    return bytes(buffer)


async def until_it_is_back(store: BlockSegments) -> None:
    with trio.fail_after(PATIENCE):
        while True:
            try:
                await read(store)
            except EngineError:
                await trio.sleep(0.1)
            else:
                return


class Work:
    """Pages that one host writes again and again, each a version later."""

    def __init__(self, store: BlockSegments, first: int) -> None:
        self.store, self.pages = store, range(first, first + 2)
        self.acknowledged = dict.fromkeys(self.pages, 0)
        self.begun = dict.fromkeys(self.pages, 0)
        self.errors: list[EngineError] = []
        self.slowest = 0.0
        self.count = 0

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            for page in self.pages:
                nursery.start_soon(self._write, page)

    async def _write(self, page: int) -> None:
        while True:
            self.begun[page] += 1
            began = trio.current_time()
            try:
                await self.store.write([Transfer(1, page * PAGE, image(page, self.begun[page]))])
                self.acknowledged[page] = self.begun[page]
                self.count += 1
            except EngineError as error:
                self.errors.append(error)
                await trio.sleep(0.1)
            finally:
                self.slowest = max(self.slowest, trio.current_time() - began)

    async def until(self, what: str) -> None:
        """`errors` or `count`: one more of them."""
        before = self._number(what)
        with trio.fail_after(PATIENCE):
            while self._number(what) <= before:  # noqa: ASYNC110 - what is waited for is a real device's
                await trio.sleep(0.05)

    def _number(self, what: str) -> int:
        found = getattr(self, what)
        return found if isinstance(found, int) else len(found)

    async def check(self, other: BlockSegments) -> None:
        """Another host sees the last acknowledged version, or one whose write failed later."""
        for page in self.pages:
            data = await read(other, page * PAGE)
            version = int(data[:8])
            assert data == image(page, version)
            assert self.acknowledged[page] <= version <= self.begun[page]


def image(page: int, version: int) -> bytes:
    return (b"%08d %06d " % (version, page)) * (PAGE // 16)


# -- what the kernel says -------------------------------------------------------------------------------


@pytest.fixture
def conf(hosts: tuple[Host, Host], tmp_path: Path) -> Path:
    devices = json.dumps([str(hosts[0].device)])
    lines = f'volume.path = "{tmp_path}/volume"', f'segments.engine = "block"\nsegments.devices = {devices}'
    (tmp_path / "mount.conf").write_text("\n".join([*lines, f"segments.deadline = {DEADLINE}", ""]))
    return tmp_path / "mount.conf"


def test_doctor_names_connections_that_hold_up_calls(fabric: Target, hosts: tuple[Host, Host], conf: Path) -> None:
    """Those with the kernel's own timeouts, and those whose timeouts are longer than the volume's deadline."""
    careless = fabric.connect("careless", "tcp", fast_io_fail_tmo=None, ctrl_loss_tmo=None, keep_alive_tmo=None)
    hasty = fabric.connect("hasty", "rdma", ctrl_loss_tmo=10, fast_io_fail_tmo=9, keep_alive_tmo=12)
    try:
        done = CliRunner().invoke(cli, ["doctor", str(conf), "--json"])
        rows = {row["name"]: row for row in json.loads(done.stdout)}
    finally:
        for host in (careless, hasty):
            host.disconnect()
    assert "a device of the volume" in rows[str(hosts[0].device)]["detail"]
    for host, transport in zip(hosts, ("tcp", "rdma"), strict=True):
        row = rows[host.controller]
        assert (row["state"], row["detail"]) == ("ok", f"NVMe over {transport}, fails in time")
    assert rows[careless.controller]["state"] == rows[hasty.controller]["state"] == "warn"
    assert "fast_io_fail_tmo is not set" in rows[careless.controller]["detail"]
    assert "9 and 12 s, are longer than segments.deadline" in rows[hasty.controller]["detail"]
    assert "ctrl_loss_tmo is 10 s" in rows[hasty.controller]["detail"]


# -- reservations ---------------------------------------------------------------------------------------


async def test_reservations_are_refused_by_a_target_that_has_none(
    hosts: tuple[Host, Host], caplog: pytest.LogCaptureFixture
) -> None:
    """As that of Linux before 6.13, and the machine has 6.1: so what they do is tried on no real device here.

    It says so by a status of NVMe, and not by an errno.
    """
    store = await BlockSegments.open([hosts[0].device], VOLUME, deadline=DEADLINE, reservations=True)
    assert f"{hosts[0].device} has none" in caplog.text
    assert store.identity() == b""
    await store.create(1, MIB)
    await store.aclose()


# -- what fails -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tcp", "rdma"])
async def test_a_port_that_closes_under_load_is_an_error_in_time(
    fabric: Target, hosts: tuple[Host, Host], kind: str
) -> None:
    """The host on the other port goes on, and the first one does, too, when the port is open again."""
    async with opened(hosts[0]) as near, opened(hosts[1]) as far:
        await near.create(1, 4 * MIB)
        works = Work(near, 0), Work(far, 2)
        cut, other = works if kind == "tcp" else works[::-1]
        async with trio.open_nursery() as nursery:
            for work in works:
                nursery.start_soon(work.run)
                await work.until("count")
            fabric.close_port(kind)
            try:
                await cut.until("errors")
                await other.until("count")
            finally:
                fabric.open_port(kind)
            await cut.until("count")
            nursery.cancel_scope.cancel()
        for work in works:
            print(f"{work.count} writes, {len(work.errors)} errors ({work.errors[:1]}), slowest {work.slowest:.1f} s")
            assert work.slowest < DEADLINE + SLACK
            for store in (near, far):
                await work.check(store)
        assert not other.errors


async def test_a_namespace_that_is_gone_is_an_error_and_is_found_again(
    fabric: Target, hosts: tuple[Host, Host]
) -> None:
    """Reads give no bytes then and writes find no room. It comes back under another name while the old one is open."""
    async with opened(hosts[0]) as near, opened(hosts[1]) as far:
        await near.create(1, 4 * MIB)
        await near.write([Transfer(1, 0, image(0, 1))])
        raw = [os.open(host.device, os.O_RDWR | os.O_DSYNC) for host in hosts]  # whoever holds on to the old names
        fabric.switch(on=False)
        try:
            for store in (near, far):
                with trio.fail_after(PATIENCE):
                    while True:  # the news of it comes a moment later
                        try:
                            await store.write([Transfer(1, PAGE, image(1, 1))])
                        except EngineError as error:
                            assert not isinstance(error, EngineFull)
                            print(f"writing: {error}")
                            break
                with pytest.raises(EngineError) as caught:
                    await read(store)
                print(f"reading: {caught.value}")
            for descriptor in raw:
                with pytest.raises(OSError) as refused:
                    os.pwrite(descriptor, bytes(4096), 2 * MIB)
                assert refused.value.errno == errno.ENOSPC
                assert os.pread(descriptor, 4096, 2 * MIB) == b""
        finally:
            fabric.switch(on=True)
            for store in (near, far):
                await until_it_is_back(store)
            for descriptor in raw:
                os.close(descriptor)
        names = [node.name for host in hosts for node in nodes_of(host.controller)]
        print(f"now {names}")
        assert names
        assert not any(name.endswith("n1") for name in names), "they have the names of before"
        assert await read(far) == await read(near) == image(0, 1)
        await far.write([Transfer(1, PAGE, image(1, 2))])
        assert await read(near, PAGE) == image(1, 2)
