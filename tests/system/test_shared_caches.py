"""Two hosts with one cache on real servers: they fill it again and again, and each hears of what the other evicts."""

from __future__ import annotations

import json
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from cluster_lab import BYTES_OF_HOSTS, MEMORY
from filling import KIB, MIB, block_bytes, free_bytes, total_bytes
from loop_lab import loop_devices
from mounting import KvfuseMount, conf_elsewhere, shared_conf, wait_until

from kvfuse.usrbio.client import BlockStore
from kvfuse_cluster.etcd import EtcdServers

pytestmark = pytest.mark.root

CAPACITY = 64 * MIB
WORDS = (
    f"volume.capacity={CAPACITY}",
    "volume.segment_size=32MiB",
    "records.deadline=1.5",  # a freed slot rests for twice that
    "namespace.kind=blocks",
    "namespace.eviction=lru",
    "namespace.admission=all",
    "publish=strict",
)
BLOCK = 256 * KIB
Mounts = tuple[KvfuseMount, KvfuseMount]


@pytest.fixture(params=BYTES_OF_HOSTS)
def mounts(request: pytest.FixtureRequest, etcd: EtcdServers) -> Iterator[Mounts]:
    """A cache as two hosts have it mounted. At the end both are unmounted, and it must be clean."""
    ceph = request.getfixturevalue("ceph") if request.param == "rados" else None
    with tempfile.TemporaryDirectory(prefix="kvfuse-caches-") as base, ExitStack() as stack:
        made: list[KvfuseMount] = []
        confs = [shared_conf(Path(base), etcd, ceph)] * 2
        if request.param == "block":
            memory = stack.enter_context(tempfile.TemporaryDirectory(dir=MEMORY))
            devices = stack.enter_context(loop_devices(Path(memory) / "image", 2 * CAPACITY, 2))
            conf = shared_conf(Path(base), etcd, device=devices[0])
            confs = [conf, conf_elsewhere(conf, *devices)]
        try:
            for name, conf in zip(("one", "two"), confs, strict=True):
                (Path(base) / name).mkdir()
                mount = KvfuseMount(Path(base) / name, WORDS, source=conf)
                made.append(mount)
                mount.mount()
            yield made[0], made[1]
            for mount in made:
                if mount.is_mounted:
                    mount.check_unexpected_errors()
                    mount.unmount()
            made[0].fsck(verify=True)
        finally:
            for mount in made:
                mount.remove()


on_files = pytest.mark.parametrize("mounts", ["file"], indirect=True)


def store(mount: KvfuseMount, prefix: str, count: int, is_over: Callable[[], bool] = lambda: False) -> list[str]:
    """Store blocks as engines do, under another name first."""
    names = [f"{prefix}-{number}" for number in range(count)]
    for name in names:
        path = mount.point / name
        temporary = path.with_name(f"{name}.tmp")
        temporary.write_bytes(block_bytes(path, BLOCK))
        temporary.rename(path)
        if is_over():
            break
    return names


def present(mount: KvfuseMount, names: list[str]) -> list[str]:
    """Those that are there, with the right bytes."""
    found = []
    for name in names:
        try:
            data = (mount.point / name).read_bytes()
        except FileNotFoundError:
            continue
        assert data == block_bytes(mount.point / name, BLOCK), name
        found.append(name)
    return found


def statistics(mount: KvfuseMount) -> dict[str, int]:
    found: dict[str, int] = json.loads((mount.point / ".kvfuse" / "stats").read_text())["namespaces"][0]["cache"]
    return found


@pytest.mark.ring(3)
def test_two_hosts_store_twice_what_fits(mounts: Mounts) -> None:
    count = CAPACITY // BLOCK
    is_over = threading.Event()

    def watch(mount: KvfuseMount) -> None:
        while not is_over.wait(0.01):
            assert 0 <= free_bytes(mount) <= total_bytes(mount) <= CAPACITY

    with ThreadPoolExecutor(4) as pool:
        watching = [pool.submit(watch, mount) for mount in mounts]
        storing = [pool.submit(store, mount, f"block-{number}", count) for number, mount in enumerate(mounts)]
        stored = [task.result() for task in storing]
        is_over.set()
        for task in watching:
            task.result()
    for names, mount, other in zip(stored, mounts, reversed(mounts), strict=True):
        assert names[-1] in present(other, names[-5:])
        found = present(mount, names)
        assert 0 < len(found) < len(names)
        assert statistics(mount)["room"] > 0


@on_files
def test_what_one_evicts_is_a_miss_for_the_other_at_once(mounts: Mounts) -> None:
    """Also where its kernel has name and bytes, and where a ring's thread has found the block before."""
    one, two = mounts
    count = CAPACITY // BLOCK
    first, bound, opened = store(one, "first", 3)
    assert present(two, [first]) == [first]
    with BlockStore(two.point, two.point) as blocks, (two.point / opened).open("rb") as file:
        for _ in range(3):
            assert blocks.get(bound) == block_bytes(two.point / bound, BLOCK)
        store(one, "more", 2 * count)
        wait_until(lambda: not any((one.point / name).exists() for name in (first, bound, opened)), "the eviction")
        for name in (first, bound, opened):
            assert not (two.point / name).exists()
        assert blocks.get(bound) is None
        assert file.read() == block_bytes(two.point / opened, BLOCK)


def is_free(mount: KvfuseMount, other: KvfuseMount) -> bool:
    """Nothing is stored. Each host keeps a few empty slabs for its next blocks, and gives them away when asked."""
    stats = json.loads((other.point / ".kvfuse" / "stats").read_text())
    kept = stats["store"]["free_slabs"] * stats["slab_size"]
    return kept <= CAPACITY // 4 and free_bytes(mount) + kept == total_bytes(mount)


@on_files
def test_a_clear_is_a_miss_for_both_at_once(mounts: Mounts) -> None:
    """Also where the other kernel has name and bytes, and where a ring's thread has found the block before."""
    one, two = mounts
    keys = [f"block-{number}" for number in range(2000)]
    folder, other = [mount.point / "cache" for mount in mounts]
    descriptor: dict[str, str | int] = {"model": "llama", "version": 1}
    with BlockStore(one.point, folder, descriptor=descriptor) as mine:
        os.setxattr(folder, "user.kvfuse.namespace", b"kind=blocks admission=all")
        assert all(mine.put_many(keys, [key.encode() * 100 for key in keys]))
        with BlockStore(two.point, other) as theirs:
            wait_until(lambda: all(theirs.exists(keys)), "the other host's blocks")
            for key in keys[:200]:
                assert bytes(theirs.get(key) or b"") == key.encode() * 100
            assert (other / keys[0]).read_bytes() == keys[0].encode() * 100
            opened = (other / keys[1]).open("rb")
            os.setxattr(folder, "user.kvfuse.clear", b"now")
            assert not any(mine.exists(keys))
            assert not (folder / keys[0]).exists()
            mine.put(keys[0], b"new")
            wait_until(lambda: not any(theirs.exists(keys[1:])), "the watch")
            assert all(theirs.get(key) is None for key in keys[1:200])
            assert not (other / keys[1]).exists()
            wait_until(lambda: theirs.exists(keys[:1])[0], "the new block")
            assert theirs.get(keys[0]) == b"new"
            assert (other / keys[0]).read_bytes() == b"new"
            assert opened.read() == keys[1].encode() * 100
            opened.close()
            assert os.listdir(other) == [keys[0]]
        with BlockStore(two.point, other, descriptor={**descriptor, "version": 2}) as newer:
            assert not any(newer.exists(keys))
            newer.put(keys[2], b"version 2")
            wait_until(lambda: os.listdir(folder) == [keys[2]], "what the newer version cleared")
            with pytest.raises(FileExistsError):
                BlockStore(one.point, folder, descriptor=descriptor)
    (other / keys[2]).unlink()
    for mount, neighbour in ((one, two), (two, one)):
        wait_until(lambda here=mount, there=neighbour: is_free(here, there), "the room")


def usage(mount: KvfuseMount, name: str) -> tuple[int, int]:
    """(bytes, files) of a namespace, as a host says: of files those of all hosts, of blocks its own."""
    rows = json.loads((mount.point / ".kvfuse" / "stats").read_text())["namespaces"]
    used = next(row["used"] for row in rows if row["path"] == f"/{name}")
    return used["bytes"], used["files"]


@on_files
def test_hosts_share_quotas(mounts: Mounts) -> None:
    """A cache takes more than its quota through both hosts, and no file is refused; files get EDQUOT at theirs."""
    quota = 6 * MIB
    both = {"cache": b"kind=blocks admission=all capacity=6MiB", "files": b"kind=files capacity=4MiB"}
    for name, settings in both.items():
        (mounts[0].point / name).mkdir()
        os.setxattr(mounts[0].point / name, "user.kvfuse.namespace", settings)
    wait_until(lambda: (mounts[1].point / "files").is_dir(), "the folders")
    seen: list[int] = []

    def fill(number: int) -> None:
        for at in range(3 * quota // BLOCK // 4):
            (mounts[number].point / "cache" / f"{number}-{at}").write_bytes(bytes(BLOCK))
            seen.append(sum(usage(mount, "cache")[0] for mount in mounts))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(fill, range(2)))
    # one mount is asked after the other, and may have taken room from it meanwhile, as much as a host takes at a time
    assert quota // 2 < max(seen) <= quota + 2 * MIB
    wait_until(lambda: sum(usage(mount, "cache")[0] for mount in mounts) <= quota, "the use of both")
    written = 0
    with pytest.raises(OSError, match="quota"):
        for at in range(17):
            with (mounts[at % 2].point / "files" / str(at)).open("wb", buffering=0) as file:
                file.write(bytes(BLOCK))
            written += 1
    assert 12 <= written <= 16
    assert len(os.listdir(mounts[0].point / "files")) >= written


@on_files
@pytest.mark.parametrize("killed", [0, pytest.param(1, marks=pytest.mark.ring(3))])
def test_a_host_is_killed_while_both_evict(mounts: Mounts, killed: int) -> None:
    """The other one goes on, takes over what the killed one had, and evicts that, too."""
    victim, survivor = mounts[killed], mounts[1 - killed]
    is_dying, is_over = threading.Event(), threading.Event()

    def store_until_killed() -> None:
        try:
            store(victim, "victim", 100_000, is_over.is_set)
        except OSError:
            assert is_dying.is_set()

    def left() -> list[str]:
        names = os.listdir(survivor.point)
        return [name for name in names if name.startswith("victim-") and not name.endswith(".tmp")]

    with ThreadPoolExecutor(2) as pool:
        dying = pool.submit(store_until_killed)
        going_on = pool.submit(store, survivor, "survivor", 100_000, is_over.is_set)
        try:
            wait_until(lambda: statistics(victim)["room"] > 50, "evictions")
            is_dying.set()
            victim.kill()
        finally:
            is_over.set()
        dying.result()
        going_on.result()
    assert len(present(survivor, left()[::7])) > 0
    for turn in range(12):
        store(survivor, f"after-{turn}", CAPACITY // BLOCK // 2)
        if not left():
            break
    assert left() == []
