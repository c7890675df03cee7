"""Blocks that are rows, from the memory of the host that stored them: before the medium has them."""

from __future__ import annotations

import random
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, cast

import trio
from block_hosts import BlockHost, block_hosts
from peer_hosts import until
from shared_lab import volumes
from volume_lab import MIB, Chaos, Disk, lab_options

from kvfuse.options.options import PeerOptions
from kvfuse.peer import service


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def peers_of(host: BlockHost) -> Any:
    return host.volume.sections["peers"]()


@asynccontextmanager
async def linked(rng: random.Random, chaos: list[Chaos], *, strict: bool) -> AsyncIterator[list[BlockHost]]:
    options = lab_options(capacity=64 * MIB, strict=strict)
    disk = Disk.format(options, shared=True)
    async with volumes(disk, options, len(chaos), rng, chaos) as mounted, trio.open_nursery() as nursery:
        for volume in mounted:
            peers = PeerOptions(listen=f"127.0.0.1:{free_port()}", connections=1, deadline=5.0)
            await nursery.start(partial(service.serve_peers, volume, options=peers))
        found = await block_hosts(mounted, is_strict=strict)
        for host in found:
            await until(
                lambda host=host: sum(one["block_connections"] for one in peers_of(host)["hosts"]) == len(chaos) - 1
            )
        yield found
        nursery.cancel_scope.cancel()


async def test_blocks_come_from_a_host_whose_medium_takes_nothing(rng: random.Random) -> None:
    chaos = [Chaos(random.Random(number)) for number in range(2)]
    async with linked(rng, chaos, strict=False) as (one, two):
        await one.put(b"first", b"on the medium")
        await one.written()
        chaos[0].write_error = 1.0
        data = {b"%d" % number: rng.randbytes(size) for number, size in enumerate([1, 4096, 300_000, 600_001])}
        names = [b"many-%d" % number for number in range(400)]
        for name, content in [*data.items(), *[(name, name) for name in names[:300]]]:
            await one.put(name, content)
        for name, content in data.items():
            await two.until(name, content)
            assert await two.read(name) == content
        assert await two.get(b"none") is None
        await two.until(names[299], names[299])  # the index has it, and those before it
        await two.engine.renew(is_strict=False, directory=two.folder, names=names)
        found = [two.engine.find(two.folder, name) is not None for name in names]
        assert found == [True] * 300 + [False] * 100
        assert await two.get(b"first") == b"on the medium"
        one.engine.drop(one.folder, [b"0"])
        chaos[0].write_error = 0.0


async def test_strict_hosts_that_ask_each_other_see_all_at_once(rng: random.Random) -> None:
    chaos = [Chaos(random.Random(number)) for number in range(3)]
    async with linked(rng, chaos, strict=True) as hosts:
        model: dict[bytes, bytes] = {}
        for step in range(60):
            host, name = rng.choice(hosts), b"%d" % rng.randrange(6)
            if rng.random() < 0.7:
                model[name] = b"%d" % step * rng.choice([1, 3000])
                await host.put(name, model[name])
            else:
                found = await host.engine.remove(host.folder, [name], is_strict=True)
                await host.written()
                assert found == [model.pop(name, None) is not None]
            reader = rng.choice(hosts)
            assert await reader.get(name) == model.get(name), step
        assert not any(host.engine.statistics()["rounds"] for host in hosts)


async def test_of_two_hosts_the_later_put_counts_however_soon_it_is(rng: random.Random) -> None:
    """Also where a host stored several blocks within one tick of the kernel's clock."""
    chaos = [Chaos(random.Random(number)) for number in range(2)]
    async with linked(rng, chaos, strict=False) as hosts:
        for step in range(60):
            first, second = rng.sample(hosts, 2)
            for number in range(4):
                await first.put(b"key", b"%d-%d" % (step, number))
            await second.put(b"key", b"%d" % step)
            for host in hosts:
                await host.engine.flush()
            for host in hosts:
                await host.engine.renew(is_strict=True, directory=host.folder, names=[b"key"])
            assert [await host.get(b"key") for host in (first, second)] == [b"%d" % step] * 2


async def test_the_segments_are_asked_soon_where_a_host_is_late(rng: random.Random) -> None:
    """Not when it would have failed: nobody asks them beside it."""
    chaos = [Chaos(random.Random(number)) for number in range(2)]
    async with linked(rng, chaos, strict=False) as (one, two):
        await one.put(b"key", b"content" * 10_000)
        await one.written()
        neighbours = cast(service.Peers, two.engine.core.reads.neighbours)
        (neighbour,) = neighbours.neighbours.values()
        await until(lambda: neighbour.has_blocks_ready)
        asked: list[float] = []

        def ask(asker: object, chosen: object, flags: int, without: int) -> int:
            asked.append(trio.current_time())
            return 1  # and it never answers

        neighbour.ask_blocks = ask  # type: ignore[method-assign, assignment]
        neighbour.abandon_blocks = lambda asker: asked.append(trio.current_time())  # type: ignore[method-assign]
        assert await two.get(b"key") == b"content" * 10_000
        assert asked[1] - asked[0] < service.LATE_MIN


async def test_a_block_whose_bytes_were_wrong_once_is_found_again(rng: random.Random) -> None:
    """By a round, though its head is as it was."""
    options = lab_options(capacity=64 * MIB)
    disk = Disk.format(options, shared=True)
    async with volumes(disk, options, 2, rng) as mounted:
        one, two = await block_hosts(mounted)
        await one.put(b"key", b"content" * 1000)
        await one.written()
        await two.engine.renew(is_strict=True)
        segment = next(segment for segment in disk.segments.values() if b"content" * 1000 in segment)
        place = segment.index(b"content" * 1000)
        segment[place] ^= 1
        assert await two.get(b"key") is None
        segment[place] ^= 1
        await two.until(b"key", b"content" * 1000)


async def test_holders_are_told_of_uses_by_connections(rng: random.Random) -> None:
    """And by no record."""
    chaos = [Chaos(random.Random(number)) for number in range(2)]
    async with linked(rng, chaos, strict=False) as (one, two):
        data = {b"%d" % number: rng.randbytes(4096) for number in range(20)}
        for name, content in data.items():
            await one.put(name, content)
        await one.written()
        heard = list[int]()
        hear_uses, one.engine.hear_uses = one.engine.hear_uses, lambda uses: heard.extend(uses["sequence"].tolist())
        for name, content in data.items():
            await two.until(name, content)
        await until(lambda: len(set(heard)) == len(data))
        one.engine.hear_uses = hear_uses
        assert two.volume.sections["reports"]()["sent"] == 0
        await two.until(b"0", data[b"0"])
