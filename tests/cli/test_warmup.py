"""`kvfuse warmup`: blocks and files come into the tiers, at a pace; what is not there is no error."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_lab import Place, assert_fails, kvfuse
from mounting import KVFUSE, KvfuseMount, shared_conf, wait_until
from places import ROOT

from kvfuse.cli.rate_pace import AHEAD_SECONDS, RatePace
from kvfuse.cli.warming import PIECE, batches_of_paths
from kvfuse.usrbio.client import BlockStore
from kvfuse_cluster.etcd import EtcdServers

MIB = 1 << 20


def warmed(*words: str | Path, status: int = 0) -> dict[str, str]:
    """The rows of what it says at the end."""
    done = kvfuse("warmup", *words)
    assert done.returncode == status, done.stderr
    return dict(line.strip().rsplit(maxsplit=1) for line in done.stdout.splitlines() if line.strip(" ─"))


def stats(point: Path) -> dict[str, dict[str, int]]:
    found = json.loads((point / ".kvfuse" / "stats").read_bytes())
    assert isinstance(found, dict)
    return found


def fill(point: Path, rng: random.Random) -> None:
    assert kvfuse("namespace", "create", point / "blocks").returncode == 0
    (point / "blocks" / "deeper").mkdir()
    for folder in ("blocks", "blocks/deeper"):
        with BlockStore(point, folder) as store:
            for number in range(20):
                store.put(b"key %d" % number, rng.randbytes(256 << 10))
    (point / "files").mkdir()
    (point / "files" / "empty").touch()
    (point / "files" / "large").write_bytes(rng.randbytes(65 * MIB))
    (point / "link").symlink_to("files/large")
    os.mkfifo(point / "fifo")


@pytest.fixture
def cold(place: Place, rng: random.Random) -> Iterator[Place]:
    """Blocks and files that are in no tier."""
    assert kvfuse("mount", place.volume, place.point, "-o", "capacity=256MiB").returncode == 0
    fill(place.point, rng)
    assert kvfuse("umount", place.point).returncode == 0
    assert kvfuse("mount", place.volume, place.point).returncode == 0
    yield place
    if (place.volume / "segments").stat().st_mode & 0o1000:  # a test has damaged it, and says so
        return
    place.end_sound()


def test_files_below_a_folder_are_read_into_memory(cold: Place) -> None:
    point = cold.point
    assert stats(point)["store"]["resident"] == 0
    reads = stats(point)["segments"]["read_bytes"]
    rows = warmed(point)
    assert (rows["hits"], rows["misses"], rows["failed"]) == ("42", "0", "0")
    assert rows["read"] == "75MiB"
    after = stats(point)["segments"]["read_bytes"]
    assert after - reads >= 10 * MIB
    with BlockStore(point, "blocks", create=False) as store:
        assert store.exists([b"key 1"]).all()
        for number in range(20):
            with store.view(b"key %d" % number) as view:
                assert view is not None
    assert warmed(point / "blocks")["hits"] == "40"
    assert stats(point)["segments"]["read_bytes"] == after
    assert warmed(point / "files" / "empty", point / "blocks" / "deeper")["hits"] == "21"


def test_keys_of_a_file_and_of_stdin_and_misses(cold: Place) -> None:
    folder, keys = cold.point / "blocks", cold.base / "keys"
    keys.write_text("".join(f"key {number}\n" for number in range(10, 30)))
    rows = warmed(folder, "--keys", keys)
    assert (rows["hits"], rows["misses"], rows["failed"]) == ("10", "10", "0")
    done = subprocess.run(
        [*KVFUSE, "warmup", folder, "--keys", "-"],
        input=b"key 1\n\nkey 2",
        capture_output=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
    )
    assert re.search(rb"hits +2 ", done.stdout)
    keys.write_text("a/b\n")
    assert_fails(kvfuse("warmup", folder, "--keys", keys), 1, "key 1 is longer than 255 bytes, or has a slash")


def test_what_cannot_be_is_refused(cold: Place) -> None:
    assert_fails(kvfuse("warmup", cold.base), 5, "is not in a kvfuse mount")
    assert_fails(kvfuse("warmup", cold.point / "absent"), 1, "absent: No such file")
    for words in (["--rate", "much"], ["--parallel", "0"], ["--keys", cold.base / "none"]):
        assert kvfuse("warmup", cold.point, *words).returncode == 2


def test_rings_that_are_off_are_no_reason_to_fail(place: Place, rng: random.Random) -> None:
    assert kvfuse("mount", place.volume, place.point, "-o", "capacity=256MiB,usrbio.enabled=false").returncode == 0
    (place.point / "file").write_bytes(rng.randbytes(3 * MIB))
    rows = warmed(place.point)
    assert (rows["hits"], rows["read"]) == ("1", "3MiB")


def test_a_damaged_file_is_named_and_the_others_are_read(cold: Place) -> None:
    (cold.point / "closed").mkdir()
    assert kvfuse("umount", cold.point).returncode == 0
    for segment in (cold.volume / "segments").iterdir():
        with segment.open("r+b") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(16 * MIB)  # behind the heads
            file.write(bytes(size - 16 * MIB))
    (cold.volume / "segments").chmod(0o1700)
    assert kvfuse("mount", cold.volume, cold.point).returncode == 0
    done = kvfuse("warmup", cold.point / "files")
    assert done.returncode == 1, done.stdout
    assert f"not read: {cold.point}/files: large: Input/output error" in done.stderr


def test_ctrl_c_ends_it_with_a_summary(cold: Place) -> None:
    process = subprocess.Popen(
        [*KVFUSE, "warmup", cold.point / "blocks", "--rate", "256KiB/s"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    wait_until(lambda: stats(cold.point)["store"]["resident"] > 0, "the first block")
    process.send_signal(signal.SIGINT)
    said, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "interrupted: what was read stays" in errors
    assert re.search(r"hits +\d+ ", said)
    assert stats(cold.point)["store"]["resident"] < 40


def test_a_pace_is_kept_by_all_who_share_it() -> None:
    now = 0.0
    pace = RatePace(100 * MIB, lambda: now)
    assert pace.take(0) == 0
    waits = [pace.take(10 * MIB) for _ in range(10)]
    assert waits == pytest.approx([0.1 * number - AHEAD_SECONDS for number in range(1, 11)], abs=AHEAD_SECONDS + 1e-9)
    now = 100.0
    assert pace.take(10 * MIB) == pytest.approx(0.0)
    assert pace.take(10 * MIB) == pytest.approx(0.1)
    assert RatePace(0).take(1 << 40) == 0


def test_batches_have_few_names_and_bytes(tmp_path: Path) -> None:
    for number in range(70):
        (tmp_path / f"{number}").write_bytes(bytes(number))
    for name in ("a", "b", "c"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(40 * MIB)
    with (tmp_path / "z").open("wb") as file:
        file.truncate(64 * PIECE + 1)
    batches = list(batches_of_paths([tmp_path]))
    assert sorted(name for batch in batches for name in batch.names) == sorted(
        os.fsencode(n) for n in os.listdir(tmp_path)
    )
    for batch in batches:
        sizes = [(tmp_path / os.fsdecode(name)).stat().st_size for name in batch.names]
        assert len(sizes) <= 32
        assert sum(sizes) <= 64 * MIB or len(sizes) == 1
        assert batch.is_large == (b"z" in batch.names)


@pytest.mark.root
def test_the_disk_near_the_host_gets_them_too(tmp_path: Path, etcd: EtcdServers, rng: random.Random) -> None:
    conf = shared_conf(tmp_path, etcd)
    made = []
    try:
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            words = (f"cache.disk_path={tmp_path / name / 'disk'}", "cache.disk_size=256MiB")
            made.append(KvfuseMount(tmp_path / name, words, source=conf))
            made[-1].mount()
        fill(made[0].point, rng)
        point, begun = made[1].point, time.monotonic()
        rows = warmed(point / "blocks", "--rate", "10MiB/s")
        assert rows["hits"] == "40"
        assert time.monotonic() - begun > 0.5
        wait_until(lambda: stats(point)["disk"]["used_bytes"] >= 9 * MIB, "copies on the disk")
        for mount in made:
            mount.unmount()
        made[0].fsck()
    finally:
        for mount in made:
            mount.remove()
