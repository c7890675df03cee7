"""vLLM's own tiering manager and region over a mount: chunks and back, prefixes, ranks, groups, events, faults."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from engine_host import Engine, EngineError, EngineHost
from engine_mounts import WORDS, EngineWork, Known, damage, outliving_mount, run_beside_all, started
from mounting import KvfuseMount, stop_process, stopped, wait_until

from kvfuse.connectors.vllm.config import configuration

pytestmark = pytest.mark.needs("vllm")

COUNT = 12
SEED = 7


def test_chunks_go_from_one_engine_to_another(host: EngineHost, mount: KvfuseMount) -> None:
    with started(host, mount, "go") as first, started(host, mount, "go") as second:
        assert first.in_place()
        assert second.lookup(SEED, 3) == ["RETRY"] * 3  # nobody waits for an answer
        assert second.load(SEED, COUNT) == 0
        first.store(SEED, COUNT - 2)
        assert second.load(SEED, COUNT) == COUNT - 2
        assert first.stats() == {"stored": COUNT - 2}
        assert second.stats() == {"loaded": COUNT - 2}
        second.forget()
        second.store(SEED, COUNT)
        assert second.stats() == {"stored": 2, "store_known": COUNT - 2}  # what is there is not stored again
        first.forget()
        assert first.load(SEED, COUNT) == COUNT
        first.close()
        second.close()


def test_a_gap_in_a_prefix_ends_it(host: EngineHost, mount: KvfuseMount) -> None:
    with started(host, mount, "gap") as engine:
        engine.store(SEED, COUNT)
        os.remove(mount.point / "gap" / engine.name(SEED, 5))  # as an eviction
        engine.forget()
        assert engine.load(SEED, COUNT) == 5
        engine.store(SEED, COUNT)
        engine.forget()
        assert engine.load(SEED, COUNT) == COUNT


def test_a_damaged_chunk_is_a_miss_until_it_is_stored_again(host: EngineHost, own_mount: KvfuseMount) -> None:
    mount = own_mount
    with started(host, mount, "damage") as engine:
        engine.store(SEED, COUNT)
        damage(mount, "damage", engine.name(SEED, 4))
        engine.forget()
        assert engine.load(SEED, COUNT) == 0
        mount.mount()
        wait_until(engine.is_up, "the engine to connect again")
        assert engine.load(SEED, COUNT) == 4
        assert engine.stats()["load_missed"] == 1  # the others of the same job are kept
        engine.store(SEED, COUNT)
        engine.forget()
        assert engine.load(SEED, COUNT) == COUNT


def test_each_rank_has_bytes_of_its_own(host: EngineHost, mount: KvfuseMount) -> None:
    with started(host, mount, "ranks", ranks=(0, 2)) as first, started(host, mount, "ranks", ranks=(1, 2)) as second:
        first.store(SEED, COUNT, "first")
        assert second.load(SEED, COUNT) == 0
        second.store(SEED, COUNT, "second")
        first.forget()
        second.forget()
        assert first.load(SEED, COUNT, "first") == second.load(SEED, COUNT, "second") == COUNT


def test_groups_of_a_hybrid_cache_do_not_mix(host: EngineHost, mount: KvfuseMount) -> None:
    with started(host, mount, "groups", groups=2) as engine:
        engine.store(SEED, 8, "attention", group=0)
        engine.store(SEED, 3, "window", group=1)
        engine.forget()
        assert engine.load(SEED, 8, "window", group=1) == 3
        assert engine.load(SEED, 8, "attention", group=0) == 8


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": "fp8"}, "dtype is 'bfloat16', not 'fp8'"),
        ({"model": "other"}, "model is 'meta/Llama 3', not 'other'"),
        ({"ranks": (0, 2)}, "tp_size is 1, not 2"),
        ({"groups": 2}, "groups is '1:"),
        ({"revision": "v2"}, "revision is '', not 'v2'"),
        ({"hash": "xxhash"}, "hash is 'sha256', not 'xxhash'"),
    ],
)
def test_blocks_of_others_are_refused_at_the_start(
    host: EngineHost, mount: KvfuseMount, change: dict[str, object], words: str
) -> None:
    with started(host, mount, "refused"), host.engine() as other:
        with pytest.raises(EngineError, match="DescriptorMismatch") as refused:
            other.start(str(mount.point), "refused", **change)
        assert words in str(refused.value)


def test_chunks_that_come_later_than_computing_takes_are_misses(host: EngineHost, mount: KvfuseMount) -> None:
    with (
        started(host, mount, "slow") as writer,
        started(host, mount, "slow", prefill_tokens_per_second=1e12) as fast,
        started(host, mount, "slow", prefill_tokens_per_second=1.0) as slow,
    ):
        writer.store(SEED, COUNT)
        assert fast.load(SEED, COUNT) == 0
        assert fast.stats() == {"lookup_too_slow": COUNT}
        assert slow.load(SEED, COUNT) == COUNT


def test_stores_beyond_the_backlog_are_shed(host: EngineHost, mount: KvfuseMount) -> None:
    with started(host, mount, "shed", threads=1, store_backlog="256KiB", deadline=0.5) as engine:
        wait_until(engine.is_up, "a daemon that answers within the deadline")
        with stopped(mount.pid):  # the first is under way, the second waits
            engine.begin_stores(6, 4)
            wait_until(lambda: not engine.is_up(), "the deadline")
        assert engine.end_stores()[2:-1] == [False] * 3  # of others the tier says that they need not be there
        stats = engine.stats()
        assert stats["store_shed"] in (16, 20)  # the second, too, where the first did not begin yet
        assert stats["store_shed"] + stats["store_failed"] == 24


def test_events_tell_what_anybody_stored_and_removed(host: EngineHost, mount: KvfuseMount) -> None:
    (mount.point / "news").mkdir()
    os.setxattr(mount.point / "news", "user.kvfuse.namespace", b"kind=blocks admission=all")
    with started(host, mount, "news") as other:
        other.store(SEED, 3)
        with started(host, mount, "news", events=True, locality="REMOTE") as engine:
            wait_until(lambda: news(engine) == {(False, 3)}, "what was there at the start")
            other.store(SEED + 1, 2)
            wait_until(lambda: news(engine) == {(False, 5)}, "what another engine stored")
            os.remove(mount.point / "news" / other.name(SEED, 1))
            wait_until(lambda: news(engine) == {(False, 5), (True, 1)}, "what was removed")
            assert {tuple(event[1:3]) for event in engine.news()} == {("STORAGE", "REMOTE")}


def news(engine: Engine) -> set[tuple[bool, int]]:
    """(removed, chunks in all)"""
    sums: dict[bool, int] = {}
    for removed, _, _, count in engine.news():
        sums[removed] = sums.get(removed, 0) + count
    return set(sums.items())


def test_a_restart_keeps_chunks_and_a_killed_daemon_comes_back(host: EngineHost, own_mount: KvfuseMount) -> None:
    mount = own_mount
    with started(host, mount, "kept") as engine:
        engine.store(SEED, COUNT)
        mount.unmount()
        engine.forget()
        assert engine.load(SEED, COUNT) == 0
        mount.mount()
        wait_until(engine.is_up, "the engine to connect again")
        assert engine.load(SEED, COUNT) == COUNT

        mount.kill()
        engine.forget()
        assert engine.load(SEED, COUNT) == 0
        engine.store(SEED + 1, COUNT)
        stats = engine.stats()
        assert (stats["stored"], stats["store_failed"]) == (COUNT, COUNT)
        mount.mount()
        wait_until(engine.is_up, "the engine to connect again")
        engine.forget()
        engine.store(SEED + 1, COUNT)
        with started(host, mount, "kept") as other:
            assert other.load(SEED + 1, COUNT) == COUNT


@pytest.mark.parametrize("goes_on", [True, False], ids=["goes on", "is killed"])
def test_a_load_of_a_daemon_that_hangs_keeps_its_slots(host: EngineHost, own_mount: KvfuseMount, goes_on: bool) -> None:
    mount = own_mount
    with started(host, mount, "hangs", deadline=0.5) as engine:
        wait_until(lambda: is_stored(engine), "a store within the deadline")
        mount.unmount()
        assert engine.load(SEED + 1, 1) == 0
        mount.mount()  # with no chunk in shared memory
        wait_until(engine.is_up, "the engine to connect again")
        stop_process(mount.pid)
        engine.begin_load(SEED, COUNT)
        wait_until(lambda: not engine.is_up(), "the deadline")
        assert engine.finished() == []  # the daemon may go on where it was
        assert engine.load(SEED + 1, COUNT) == 0  # others do not wait
        if goes_on:
            os.kill(mount.pid, signal.SIGCONT)
        else:
            mount.kill()
        assert finished(engine) == [(False, 0)]
        if not goes_on:
            mount.mount()
        wait_until(engine.is_up, "the engine to connect again")
        engine.forget()
        wait_until(lambda: is_stored(engine), "a store within the deadline")


@pytest.mark.timeout(600)
def test_kills_and_upgrades_are_not_noticed(host: EngineHost, seed: int) -> None:
    """By this adapter, and by vLLM's own tier of files, which makes folders. A chunk that is loaded is right."""
    with outliving_mount() as mount, ExitStack() as stack:

        def work(name: str) -> EngineWork:
            engine = stack.enter_context(started(host, mount, name, is_fs=name == "files"))
            return partial(store_and_load, engine, Known(is_lossy=True))

        run_beside_all(mount, seed, {"adapter": work("adapter"), "files": work("files")})


def store_and_load(engine: Engine, known: Known, chance: random.Random, may_miss: bool) -> None:
    number = chance.randrange(1 << 32)

    def load(number: int) -> bool:
        engine.forget()
        return bool(engine.load(number, COUNT) == COUNT)

    engine.forget()
    engine.store(number, COUNT)
    known.store_and_load(number, load, chance, may_miss)


def is_stored(engine: Engine) -> bool:
    """Store, and look whether it was in time."""
    engine.store(SEED, COUNT)
    engine.forget()
    return bool(engine.load(SEED, COUNT) == COUNT)


def finished(engine: Engine) -> list[tuple[bool, int]]:
    found: list[tuple[bool, int]] = []
    wait_until(lambda: bool(found.extend(engine.finished()) or found), "the end of a job")
    return found


def test_a_mount_that_comes_after_the_engine(host: EngineHost, tmp_path: Path) -> None:
    mount = KvfuseMount(tmp_path, WORDS)
    try:
        with started(host, mount, "later") as engine:
            engine.store(SEED, COUNT)
            mount.mount()
            wait_until(engine.is_up, "the engine to connect")
            engine.forget()
            engine.store(SEED, COUNT)
            engine.forget()
            assert engine.load(SEED, COUNT) == COUNT
        mount.unmount()
        mount.fsck()
    finally:
        mount.remove()


def test_flags_and_the_example_are_as_vllm_reads_them(host: EngineHost, tmp_path: Path) -> None:
    program = tmp_path / "vllm"
    program.write_text(f"#!{sys.executable}\nimport shlex, sys\nprint(shlex.join(sys.argv[3:]))\n")
    program.chmod(0o755)
    environment = os.environ | {"VLLM": str(program), "MODEL": "llama", "MOUNT": "/mnt/kv", "NAMESPACE": "here"}
    script = Path(__file__).parents[2] / "examples" / "vllm" / "start.sh"
    example = subprocess.run([script], env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    expected = {
        "connector": "OffloadingConnector", "role": "kv_both", "spec": "TieringOffloadingSpec", "mount": "/mnt/kv",
        "namespace": "here", "class": "KvfuseTier",
    }  # fmt: skip
    with host.engine() as engine:
        assert engine.parse(configuration("/mnt/kv", "here")) == expected
        assert engine.parse(example) == expected
        assert engine.advice() == []


def test_vllm_publishes_the_counters(host: EngineHost, mount: KvfuseMount) -> None:
    with started(host, mount, "counters") as engine:
        names = engine.definitions()
    page = (Path(__file__).parents[2] / "docs" / "engines-vllm.md").read_text()
    ours = [name for name in names if name.startswith("vllm:kvfuse_")]
    assert ours
    assert [name for name in ours if name not in page] == []
