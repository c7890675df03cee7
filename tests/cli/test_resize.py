"""`kvfuse resize`: of a volume that is mounted, or not; of one host, or of many."""

from __future__ import annotations

import json
import os
import random
import subprocess
from pathlib import Path

import pytest
from cli_lab import Place, assert_fails, kvfuse
from mounting import KVFUSE, KvfuseMount, shared_conf, wait_until
from places import ROOT

from kvfuse_cluster.etcd import EtcdServers

MIB = 1 << 20
MADE = "capacity=40MiB,segment_size=16MiB"


def grow(source: Path, capacity: str = "130MiB", *more: str | Path) -> str:
    done = kvfuse("resize", source, "--capacity", capacity, *more)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def start_kvfuse(*words: str | Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*KVFUSE, *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )


def segments_size(folder: Path) -> int:
    return sum(path.stat().st_size for path in (folder / "segments").iterdir())


def size_of(point: Path) -> int:
    found = os.statvfs(point)
    return found.f_blocks * found.f_frsize


def write(point: Path, names: range, rng: random.Random) -> dict[str, bytes]:
    contents = {f"file-{number}": rng.randbytes(MIB) for number in names}
    for name, data in contents.items():
        (point / name).write_bytes(data)
    return contents


def verify(point: Path, contents: dict[str, bytes]) -> None:
    for name, data in contents.items():
        assert (point / name).read_bytes() == data, name


def assert_clean(source: Path) -> None:
    done = kvfuse("fsck", "--verify", source)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def made(place: Place) -> Place:
    assert kvfuse("mount", place.volume, place.point, "-o", MADE).returncode == 0
    return place


def test_a_mounted_volume_grows_and_the_next_daemons_have_it(made: Place, rng: random.Random) -> None:
    """The one after a kill, and the one of the next mount."""
    contents, size = write(made.point, range(30), rng), size_of(made.point)
    said = grow(made.point)
    assert "40MiB -> 130MiB" in said
    assert size_of(made.point) > 2.5 * size
    contents |= write(made.point, range(30, 90), rng)
    (before,) = json.loads(kvfuse("status", made.point, "--json").stdout)
    os.kill(before["pid"], 9)
    verify(made.point, contents)
    (after,) = json.loads(kvfuse("status", made.point, "--json").stdout)
    assert after["pid"] != before["pid"]
    assert after["space"]["size"] == before["space"]["size"]
    contents |= write(made.point, range(90, 100), rng)
    assert grow(made.volume, "160MiB")  # by the folder of a volume that is mounted
    assert kvfuse("umount", made.point).returncode == 0
    assert_clean(made.volume)
    assert_fails(kvfuse("mount", made.volume, made.point, "-o", "capacity=1GiB"), 2, "has 160MiB: .*'kvfuse resize'")
    for words in ("capacity=160MiB,segment_size=16MiB", MADE):  # or what it had
        assert kvfuse("mount", made.volume, made.point, "-o", words).returncode == 0
        verify(made.point, contents)
        assert kvfuse("umount", made.point).returncode == 0


def test_what_cannot_be_is_refused_with_the_reason(made: Place) -> None:
    size = size_of(made.point)
    for source in (made.point, made.volume):
        for capacity, status, message in (
            ("41MiB", 3, "keeps its 40MiB: .*no room for another segment .* the minimum is"),
            ("2MiB", 3, "keeps its 40MiB: .*no room for 7 slabs"),
            ("9PiB", 3, "grows to .* bytes at most"),
            ("1TiB", 2, "more than the .* that are free below .*, with what it has"),
        ):
            assert_fails(kvfuse("resize", source, "--capacity", capacity), status, message)
    assert kvfuse("resize", made.point, "--capacity", "much").returncode == 2
    assert "40MiB -> 40MiB" in grow(made.point, "40MiB")
    assert size_of(made.point) == size
    assert kvfuse("umount", made.point).returncode == 0
    assert_fails(kvfuse("resize", made.base / "none", "--capacity", "1GiB"), 3, "no kvfuse volume")


def test_a_volume_gets_smaller_mounted_or_not(made: Place, rng: random.Random) -> None:
    grow(made.point, "160MiB")
    contents = write(made.point, range(120), rng)
    for name in rng.sample(sorted(contents), 90):
        (made.point / name).unlink()
        del contents[name]
    wait_until(lambda: os.statvfs(made.point).f_bfree * 4096 > 100 * MIB, "removed files to be free")
    assert "160MiB -> 100MiB" in grow(made.point, "100MiB")
    verify(made.point, contents)
    assert size_of(made.point) <= 100 * MIB
    assert_fails(
        kvfuse("resize", made.point, "--capacity", "24MiB"), 1, "the volume stays as it is: its files do not fit"
    )
    assert kvfuse("umount", made.point).returncode == 0
    assert_clean(made.volume)
    assert "100MiB -> 60MiB" in grow(made.volume, "60MiB")
    assert sum(path.stat().st_size for path in (made.volume / "segments").iterdir()) <= 60 * MIB
    assert_clean(made.volume)
    assert kvfuse("mount", made.volume, made.point).returncode == 0
    verify(made.point, contents)
    assert size_of(made.point) <= 60 * MIB
    assert kvfuse("umount", made.point).returncode == 0


def test_an_unmounted_volume_grows_and_its_mount_conf_is_named(place: Place) -> None:
    conf = place.base / "mount.conf"
    conf.write_text(f'volume.path = "{place.volume}"\nvolume.capacity = "40MiB"\nvolume.segment_size = "16MiB"\n')
    assert kvfuse("format", conf).returncode == 0
    said = grow(conf)
    assert f"{conf}:2: volume.capacity is still 40MiB there" in said
    assert_clean(place.volume)
    assert kvfuse("mount", conf, place.point).returncode == 0
    grow(conf, "150MiB")
    assert size_of(place.point) > 120 * MIB
    assert kvfuse("umount", place.point).returncode == 0


@pytest.mark.root
def test_all_hosts_have_what_was_given_and_one_may_be_killed(
    tmp_path: Path, etcd: EtcdServers, rng: random.Random
) -> None:
    """The segments are files that both hosts see; one who has the volume not mounted may give it more, too."""
    conf = shared_conf(tmp_path, etcd)
    mounts = []
    try:
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            mounts.append(KvfuseMount(tmp_path / name, source=conf))
            mounts[-1].mount()
        one, two = mounts
        contents, size = write(one.point, range(20), rng), size_of(one.point)
        grow(conf, "900MiB")
        wait_until(lambda: all(size_of(mount.point) > 1.5 * size for mount in mounts), "both hosts")
        contents |= write(two.point, range(20, 60), rng)
        verify(one.point, contents)
        os.kill(two.pid, 9)
        grow(one.point, "1GiB")
        verify(one.point, contents)
        contents |= write(one.point, range(60, 100), rng)
        two.remove()
        one.unmount()
        assert_clean(conf)
        grow(conf, "1200MiB")  # nobody has it mounted
        one.mount()
        assert size_of(one.point) > 2 * size
        verify(one.point, contents)
        one.unmount()
        assert_clean(conf)
    finally:
        for mount in mounts:
            mount.remove()


@pytest.mark.root
def test_a_volume_of_many_hosts_gets_smaller_while_they_use_it(
    tmp_path: Path, etcd: EtcdServers, rng: random.Random
) -> None:
    """One daemon is killed meanwhile. Then nobody has it mounted, and the command is killed; then it grows again."""
    conf, mounts = shared_conf(tmp_path, etcd), []
    try:
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            mounts.append(KvfuseMount(tmp_path / name, source=conf))
            mounts[-1].mount()
        one, two = mounts
        contents = write(one.point, range(60), rng) | write(two.point, range(60, 120), rng)
        for name in rng.sample(sorted(contents), 90):
            (two.point / name).unlink()
            del contents[name]
        wait_until(lambda: os.statvfs(one.point).f_bfree * 4096 > 450 * MIB, "removed files to be free")
        with start_kvfuse("resize", one.point, "--capacity", "200MiB") as command:
            os.kill(two.pid, 9)
            said, failed = command.communicate(timeout=120)
        assert "512MiB -> 200MiB" in said, failed
        assert size_of(one.point) <= 200 * MIB
        contents |= write(one.point, range(120, 130), rng)
        verify(one.point, contents)
        assert segments_size(tmp_path) <= 200 * MIB
        two.remove()
        one.unmount()
        assert_clean(conf)
        with start_kvfuse("resize", conf, "--capacity", "140MiB") as command:
            impossible = "resize", conf, "--capacity", "9PiB"
            wait_until(
                lambda: command.poll() is not None or "is about to have" in kvfuse(*impossible).stderr, "it to begin"
            )
            command.kill()
        assert_clean(conf)
        assert "140MiB" in grow(conf, "140MiB")
        assert segments_size(tmp_path) <= 140 * MIB
        assert_clean(conf)
        (tmp_path / "three").mkdir()
        mounts = [one, KvfuseMount(tmp_path / "three", source=conf)]
        for mount in mounts:
            mount.mount()
        grow(one.point, "512MiB")
        wait_until(lambda: all(size_of(mount.point) > 400 * MIB for mount in mounts), "both hosts")
        contents |= write(mounts[1].point, range(130, 300), rng)
        verify(one.point, contents)
        for mount in mounts:
            mount.unmount()
        assert_clean(conf)
    finally:
        for mount in mounts:
            mount.remove()
