"""The shared-memory tier: slots, arenas, what goes first, and who may map what."""

from __future__ import annotations

import gc
import mmap
import os
import random
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvfuse.errors import ConfigError, NotFound
from kvfuse.volume.tier.placement import Placement, checked_placement, hugepages_are_given, online_nodes
from kvfuse.volume.tier.shared_tier import ReadClass, SharedTier, TierBlock
from kvfuse.volume.tier.tier_books import EVICTIONS_MAX

KIB = 1 << 10
MIB = 1 << 20
HERE = ReadClass(1, 0, 0, 0o444)
THERE = ReadClass(2, 0, 0, 0o444)


def allocate(tier: SharedTier, size: int, read_class: ReadClass = HERE) -> TierBlock:
    block = tier.allocate(size, read_class)
    assert block is not None
    assert len(block.buffer) == size
    return block


def keep(tier: SharedTier, ino: int, size: int, read_class: ReadClass = HERE) -> None:
    block = allocate(tier, size, read_class)
    block.buffer[:] = ino % 251
    tier.keep(ino, block)


def test_a_slot_is_free_when_the_last_view_of_it_is_gone() -> None:
    tier = SharedTier(64 * KIB)
    block = allocate(tier, 64 * KIB)
    part, view = block.buffer[10:20], memoryview(block.buffer)[1:2]
    del block
    assert tier.allocate(1, HERE) is None
    del part
    assert tier.allocate(1, HERE) is None
    del view
    assert tier.allocate(64 * KIB, HERE) is not None


def test_capacity_is_a_promise() -> None:
    tier = SharedTier(MIB)
    held = [allocate(tier, 64 * KIB - number, ReadClass(number % 3, 0, 0, 0)) for number in range(16)]
    assert tier.statistics().used_bytes == MIB
    assert tier.allocate(1, HERE) is None
    assert tier.allocate(2 * MIB, HERE) is None
    held.clear()
    assert tier.allocate(MIB, HERE) is not None, "arenas that are wholly free serve another size"
    assert tier.statistics().used_bytes <= MIB


def test_without_capacity_there_is_no_tier() -> None:
    assert SharedTier(0).allocate(1, HERE) is None


def read(tier: SharedTier, ino: int) -> bool:
    """As a reader does; whether the block is there."""
    block = tier.find(ino)
    if block is not None:
        block.note_use()
    return block is not None


def test_what_was_read_more_than_once_stays_and_of_the_others_the_first_goes() -> None:
    tier = SharedTier(16 * 64 * KIB)
    for ino in range(16):
        keep(tier, ino, 64 * KIB)
    assert read(tier, 0)
    assert read(tier, 0)
    assert read(tier, 1)
    keep(tier, 100, 64 * KIB)
    assert [tier.find(ino) is not None for ino in (0, 1, 2, 100)] == [True, False, True, True]
    assert list(tier.evicted) == [1]


def lru_hits(requests: list[int], count: int) -> list[bool]:
    """Which requests a cache of so many blocks answers that forgets what was not used for longest."""
    kept, hits = OrderedDict[int, None](), []
    for ino in requests:
        hits.append(ino in kept)
        kept[ino] = None
        kept.move_to_end(ino)
        if len(kept) > count:
            kept.popitem(last=False)
    return hits


def hot_set_and_scan(seed: int) -> list[int]:
    """Requests for 60 blocks again and again, and 4 times as many for blocks that are read once."""
    chosen, scanned = random.Random(seed), iter(range(1000, 1 << 30))
    return [chosen.randrange(60) if chosen.random() < 0.2 else next(scanned) for _ in range(8000)]


def hot_share(requests: list[int], hits: list[bool]) -> float:
    """The hit ratio of hot blocks, when the tier knows them."""
    hot = [hit for ino, hit in list(zip(requests, hits, strict=True))[3000:] if ino < 1000]
    return sum(hot) / len(hot)


def test_a_scan_of_blocks_that_are_read_once_leaves_those_that_are_read_again() -> None:
    seed = 20261126
    print("seed", seed)
    requests, tier, hits = hot_set_and_scan(seed), SharedTier(100 * 4 * KIB), list[bool]()
    for ino in requests:
        hits.append(read(tier, ino))
        if not hits[-1] and tier.is_wanted(ino):
            keep(tier, ino, 4 * KIB)
    assert hot_share(requests, lru_hits(requests, 100)) < 0.5
    assert hot_share(requests, hits) >= 0.9


@pytest.mark.parametrize("there", [HERE, THERE], ids=["same readers", "other readers"])
def test_a_flood_of_stores_leaves_blocks_that_are_read_again(there: ReadClass) -> None:
    seed = 20261126
    print("seed", seed)
    requests, tier, hits = hot_set_and_scan(seed), SharedTier(100 * 4 * KIB), list[bool]()
    for ino in range(60):
        keep(tier, ino, 4 * KIB)
        assert read(tier, ino)
        assert read(tier, ino)
    for ino in requests:
        hits.append(ino < 1000 and read(tier, ino))
        if ino >= 1000:
            keep(tier, ino, 4 * KIB, there)
        elif not hits[-1] and tier.is_wanted(ino):
            keep(tier, ino, 4 * KIB)
    assert hot_share(requests, hits) >= 0.9


def test_another_kind_gives_its_arena_when_it_is_older() -> None:
    tier = SharedTier(MIB)
    for ino in range(8):
        keep(tier, ino, 64 * KIB, THERE)
    for ino in range(100, 108):
        keep(tier, ino, 64 * KIB, HERE)
    keep(tier, 200, 64 * KIB, HERE)
    assert all(tier.find(ino) is None for ino in range(8))
    assert all(tier.find(ino) is not None for ino in range(100, 108))
    keep(tier, 300, 128 * KIB, HERE)
    assert tier.find(100) is not None, "memory of the other kind was left"


def test_blocks_that_somebody_holds_stay_and_do_not_cost_the_whole_cache() -> None:
    tier = SharedTier(100 * 4 * KIB)
    held = []
    for ino in range(100):
        held.append(allocate(tier, 4 * KIB))
        tier.keep(ino, held[-1])
    calls: list[int] = []
    tier.on_news = lambda: calls.append(len(tier.evicted))
    assert tier.allocate(4 * KIB, HERE) is None
    assert calls == [EVICTIONS_MAX]
    assert tier.find(EVICTIONS_MAX) is not None
    del held[:EVICTIONS_MAX]
    assert tier.allocate(4 * KIB, HERE) is not None


def test_a_kept_block_is_found_until_it_is_dropped_or_replaced() -> None:
    tier = SharedTier(MIB)
    first, second = allocate(tier, 100), allocate(tier, 100)
    tier.keep(5, first)
    assert tier.find(5) is first
    tier.keep(5, second)
    assert tier.find(5) is second
    tier.drop(5)
    tier.drop(5)
    assert tier.find(5) is None
    assert tier.statistics().kept_bytes == 0


def test_a_retired_directory_gets_other_arenas() -> None:
    tier = SharedTier(MIB)
    keep(tier, 1, 4 * KIB)
    pinned = tier.find(1)
    assert pinned is not None
    tier.retire([HERE.directory])
    assert tier.find(1) is None
    later = allocate(tier, 4 * KIB)
    assert later.arena != pinned.arena
    tier.keep(1, pinned)
    assert tier.find(1) is None, "a block of a retired arena is not cached again"
    used = tier.statistics().used_bytes
    del pinned
    allocate(tier, 4 * KIB)
    assert tier.statistics().used_bytes == used, "one slot more, and the retired arena is gone"


def test_an_arena_that_was_mapped_never_serves_other_readers() -> None:
    tier = SharedTier(64 * KIB)
    block = allocate(tier, 64 * KIB)
    block.buffer[:] = 1
    number = block.arena
    with os.fdopen(tier.arena_descriptor(number), "rb") as file:
        mapping = mmap.mmap(file.fileno(), 64 * KIB, prot=mmap.PROT_READ)
    del block
    other = allocate(tier, 64 * KIB, THERE)
    other.buffer[:] = 2
    assert other.arena != number
    assert set(mapping[:]) <= {0, 1}
    with pytest.raises(NotFound):
        tier.arena_descriptor(number)


def test_an_arena_that_changes_its_readers_shows_nothing_of_what_was_in_it() -> None:
    tier = SharedTier(64 * KIB)
    block = allocate(tier, 64 * KIB)
    block.buffer[:] = 1
    number = block.arena
    del block
    other = allocate(tier, 4 * KIB, THERE)
    assert other.arena != number
    assert tier.statistics().used_bytes == 64 * KIB, "the memory is the same"
    assert not other.source.bytes.any()


PROBE = """
import fcntl, mmap, os, sys
descriptor, size = int(sys.argv[1]), int(sys.argv[2])
if len(sys.argv) > 3:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
assert mmap.mmap(descriptor, size, prot=mmap.PROT_READ)[0] == 7
path = f"/proc/self/fd/{descriptor}"
for number, attempt in enumerate((
    lambda: os.open(path, os.O_RDWR),
    lambda: os.open(path, os.O_WRONLY | os.O_TRUNC),
    lambda: os.truncate(path, 0),
    lambda: os.chmod(path, 0o666),
    lambda: os.chown(path, 65534, 65534),
    lambda: os.fchmod(descriptor, 0o666),
    lambda: mmap.mmap(descriptor, size, prot=mmap.PROT_READ | mmap.PROT_WRITE),
    lambda: os.pwrite(descriptor, b"x", 0),
    lambda: os.ftruncate(descriptor, 0),
    lambda: os.posix_fallocate(descriptor, 0, 2 * size),
    lambda: fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
)):
    try:
        attempt()
    except OSError:
        continue
    sys.exit(f"attempt {number} succeeded")
print("read only")
"""


@pytest.mark.root
@pytest.mark.parametrize("user", [[], ["nobody"]], ids=["root", "unprivileged"])
def test_nobody_else_can_write_to_an_arena(user: list[str]) -> None:
    tier = SharedTier(MIB)
    block = allocate(tier, 4 * KIB)
    block.buffer[:] = 7
    descriptor = tier.arena_descriptor(block.arena)
    try:
        size = os.fstat(descriptor).st_size
        done = subprocess.run(
            [sys.executable, "-c", PROBE, str(descriptor), str(size), *user],
            pass_fds=[descriptor],
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        os.close(descriptor)
    assert done.stdout == "read only\n", done.stderr
    assert (block.buffer == 7).all()


def test_descriptors_go_with_their_arenas() -> None:
    def count() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    gc.collect()
    before = count()
    tier = SharedTier(MIB)
    block = allocate(tier, 100)
    source = block.source
    del tier, block
    gc.collect()
    assert os.preadv(source.fd, [bytearray(4)], 0) == 4, "open as long as somebody may read there"
    del source
    gc.collect()
    assert count() <= before  # less, where something of another test ended meanwhile


def test_threads_beside_each_other(seed: int) -> None:
    """Every block that is found has one value in all its bytes, that of its inode."""
    tier = SharedTier(2 * MIB)
    failures: list[str] = []
    classes = [ReadClass(number, 0, 0, 0o444) for number in range(3)]

    def work(number: int) -> None:
        rng = random.Random(f"{seed} {number}")
        pins: list[tuple[int, TierBlock]] = []
        for _ in range(3000):
            ino = rng.randrange(200)
            if (found := tier.find(ino)) is not None:
                pins.append((ino, found))
            elif (block := tier.allocate(rng.randrange(1, 40 * KIB), classes[ino % 3])) is not None:
                block.buffer[:] = ino
                tier.keep(ino, block)
            if rng.random() < 0.1:
                tier.drop(rng.randrange(200))
            if rng.random() < 0.002:
                tier.retire([rng.randrange(3)])
            while pins and (len(pins) > 8 or rng.random() < 0.3):
                ino, pin = pins.pop(rng.randrange(len(pins)))
                if np.any(pin.buffer != ino) or pin.read_class != classes[ino % 3]:
                    failures.append(f"inode {ino}: {set(pin.buffer.tolist())}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    statistics = tier.statistics()
    assert statistics.used_bytes <= 2 * MIB
    assert statistics.hits
    assert statistics.evictions
    for ino in range(200):
        tier.drop(ino)
    assert tier.allocate(2 * MIB, HERE) is not None, "no slot was lost"


# -- where the memory is ------------------------------------------------------------------------------


def huge_bytes(tier: SharedTier) -> int:
    """Bytes of huge pages in this process's arenas."""
    text = Path("/proc/self/smaps").read_text()
    parts = [part for part in text.split("VmFlags")[:-1] if "/kvfuse-tier" in part]
    return sum(int(line.split()[1]) << 10 for part in parts for line in part.splitlines() if "ShmemPmdMapped" in line)


@pytest.fixture
def huge_pages() -> Iterator[None]:
    """The kernel gives huge pages to shared memory that asks for them."""
    setting = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    try:
        before = setting.read_text().split("[")[1].split("]")[0]
        if not hugepages_are_given():
            setting.write_text("advise")
    except OSError as error:
        pytest.skip(f"this kernel gives shared memory no huge pages, nor can that be changed: {error}")
    yield
    setting.write_text(before)


def test_huge_pages_are_used_and_counted_whole(huge_pages: None) -> None:
    tier = SharedTier(16 * MIB, Placement(hugepages=True))
    held = [allocate(tier, 64 * KIB)]
    assert tier.statistics().used_bytes == 2 * MIB, "one touch takes the page"
    held += [allocate(tier, 64 * KIB) for _ in range(31)]
    assert tier.statistics().used_bytes == 2 * MIB
    held += [allocate(tier, 64 * KIB) for _ in range(224)]
    assert tier.allocate(1, THERE) is None, "capacity is a promise"
    for block in held:
        block.buffer[:] = 1
    assert huge_bytes(tier) > 0
    assert huge_bytes(tier) <= 16 * MIB


def test_capacity_is_a_promise_with_huge_pages(rng: random.Random) -> None:
    tier = SharedTier(9 * MIB, Placement(hugepages=True))
    for ino in range(1, 500):
        block = tier.allocate(rng.choice([4 * KIB, 100 * KIB, 3 * MIB]), ReadClass(rng.randrange(3), 0, 0, 0))
        assert tier.statistics().used_bytes <= 9 * MIB
        if block is not None:
            tier.keep(ino, block)


def test_memory_may_be_of_a_node() -> None:
    node = min(online_nodes())
    tier = SharedTier(MIB, Placement(node=node))
    allocate(tier, 64 * KIB).buffer[:] = 1
    maps = [line for line in Path("/proc/self/numa_maps").read_text().splitlines() if "/kvfuse-tier" in line]
    assert any(f"prefer:{node}" in line or f"prefer={node}" in line for line in maps), maps


def test_a_node_that_is_absent_is_refused() -> None:
    absent = max(online_nodes()) + 1
    with pytest.raises(ConfigError, match=rf"cache\.tier_node {absent}: this host has .*{min(online_nodes())}"):
        checked_placement(hugepages=False, node=absent)
