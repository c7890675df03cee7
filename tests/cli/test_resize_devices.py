"""`kvfuse resize` of volumes on loop devices: these join and leave, mounted or not, on one host or many."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from cli_lab import Place, assert_fails, kvfuse
from loop_lab import loop_device
from mounting import KvfuseMount, shared_conf, wait_until
from test_resize import assert_clean, size_of, verify, write

from kvfuse_cluster.etcd import EtcdServers

pytestmark = pytest.mark.root
MIB = 1 << 20
DEVICE_SIZE = 56 * MIB
"""three segments of 16 MiB"""


@pytest.fixture
def devices(tmp_path: Path) -> Iterator[list[Path]]:
    with ExitStack() as stack:
        yield [stack.enter_context(loop_device(tmp_path / name, DEVICE_SIZE)) for name in ("a", "b", "c")]


@pytest.fixture
def conf(place: Place, devices: list[Path]) -> Path:
    """Of a volume on the first two devices."""
    file = place.base / "mount.conf"
    file.write_text(
        f'volume.path = "{place.volume}"\nvolume.capacity = "77MiB"\nvolume.segment_size = "16MiB"\n'
        f'segments.engine = "block"\nsegments.devices = ["{devices[0]}", "{devices[1]}"]\n'
        'segments.domains = ["one", "two"]\n'
    )
    assert kvfuse("format", file).returncode == 0
    return file


def resize(source: Path, *words: str | Path) -> str:
    done = kvfuse("resize", source, *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_mount_by_options_alone_is_known_to_have_devices(
    place: Place, devices: list[Path], rng: random.Random
) -> None:
    words = f"segments.engine=block,segments.devices={devices[0]},segment_size=16MiB,capacity=36MiB"
    assert kvfuse("mount", place.volume, place.point, "-o", words).returncode == 0
    contents = write(place.point, range(20), rng)
    assert "2 devices" in resize(place.point, "--add-device", devices[1])
    assert "1 devices" in resize(place.point, "--remove-device", devices[0])
    verify(place.point, contents)
    assert kvfuse("umount", place.point).returncode == 0


def test_a_mounted_volume_gets_a_device_and_another_one_leaves(
    place: Place, conf: Path, devices: list[Path], rng: random.Random
) -> None:
    assert kvfuse("mount", conf, place.point).returncode == 0
    contents, size = write(place.point, range(50), rng), size_of(place.point)
    subprocess.run(["mkfs.ext4", "-q", devices[2]], check=True)
    assert_fails(kvfuse("resize", place.point, "--add-device", devices[2]), 1, "--force")
    said = resize(place.point, "--add-device", devices[2], "--domain", "two", "--weight", "7", "--force")
    assert "3 devices" in said
    assert re.search(rf"{devices[2]} +two +7 ", said)
    assert size_of(place.point) > 1.4 * size
    contents |= write(place.point, range(50, 105), rng)
    assert_fails(kvfuse("resize", place.point, "--add-device", devices[2]), 3, "one of the volume's devices already")
    (before,) = json.loads(kvfuse("status", place.point, "--json").stdout)
    os.kill(before["pid"], signal.SIGKILL)
    verify(place.point, contents)
    assert_fails(kvfuse("resize", place.point, "--remove-device", devices[0]), 1, "its log says which")  # no room
    for name in rng.sample(sorted(contents), 60):
        (place.point / name).unlink()
        del contents[name]
    wait_until(lambda: os.statvfs(place.point).f_bfree * 4096 > 60 * MIB, "removed files to be free")
    said = resize(place.point, "--remove-device", devices[0])
    assert "2 devices" in said
    assert str(devices[0]) not in said
    verify(place.point, contents)
    assert kvfuse("umount", place.point).returncode == 0
    assert_clean(conf)
    assert "a former device" in kvfuse("doctor", conf).stdout
    assert (
        kvfuse("mount", conf, place.point).returncode == 0
    )  # which names the one that left, and not the one that came
    verify(place.point, contents)
    assert kvfuse("umount", place.point).returncode == 0


def test_an_unmounted_volume_has_a_device_replaced(
    place: Place, conf: Path, devices: list[Path], rng: random.Random
) -> None:
    assert kvfuse("mount", conf, place.point).returncode == 0
    contents, size = write(place.point, range(60), rng), size_of(place.point)
    assert kvfuse("umount", place.point).returncode == 0
    said = resize(conf, "--add-device", devices[2], "--remove-device", devices[1])
    assert str(devices[2]) in said
    assert str(devices[1]) not in said
    assert "77MiB -> 77MiB" in said
    assert_clean(conf)
    assert kvfuse("mount", conf, place.point).returncode == 0
    assert size_of(place.point) == size
    verify(place.point, contents)
    assert kvfuse("umount", place.point).returncode == 0


def test_what_cannot_be_is_refused(place: Place, conf: Path, devices: list[Path]) -> None:
    for words, status, message in (
        (["--remove-device", devices[2]], 3, "none of the volume's devices"),
        (["--add-device", place.base / "none"], 1, "No such file|cannot be used"),
        (["--add-device", devices[2], "--domain", "a b"], 2, "letters, digits"),
        (["--weight", "3"], 2, "are for --add-device"),
        (["--capacity", "1TiB"], 1, "places for 6 segments"),
    ):
        assert_fails(kvfuse("resize", conf, *words), status, message)
    assert_fails(kvfuse("resize", place.base / "other", "--add-device", devices[2]), 2, "has no devices")
    assert_clean(conf)


def test_all_hosts_have_a_device_that_one_of_them_was_given(
    tmp_path: Path, etcd: EtcdServers, devices: list[Path], rng: random.Random
) -> None:
    """It is no device that their mount.conf names."""
    conf = shared_conf(tmp_path, etcd, device=devices[0])
    text = conf.read_text().replace('"512MiB"', '"45MiB"').replace('"64MiB"', '"16MiB"')
    conf.write_text(text)
    assert kvfuse("format", conf).returncode == 0
    mounts = []
    try:
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            mounts.append(KvfuseMount(tmp_path / name, source=conf))
            mounts[-1].mount()
        one, two = mounts
        contents, size = write(one.point, range(10), rng), size_of(one.point)
        resize(one.point, "--add-device", devices[1])
        wait_until(lambda: all(size_of(mount.point) > 1.5 * size for mount in mounts), "both hosts")
        contents |= write(two.point, range(10, 60), rng)
        verify(one.point, contents)
        assert "has joined the volume" in two.log.read_text()
        assert_fails(kvfuse("resize", one.point, "--remove-device", devices[1]), 1, "its log says which")
        capacity = os.getxattr(one.point, "user.kvfuse.capacity").decode()
        assert "3 devices" in resize(two.point, "--add-device", devices[2], "--capacity", capacity)
        os.kill(two.pid, signal.SIGKILL)
        verify(one.point, contents)
        two.remove()
        one.unmount()
        assert_clean(conf)
        said = resize(conf, "--remove-device", devices[1])  # nobody has it mounted
        assert "2 devices" in said
        assert str(devices[1]) not in said
        assert_clean(conf)
        one.mount()
        verify(one.point, contents)
        one.unmount()
        assert_fails(kvfuse("resize", conf, "--remove-device", devices[2]), 1, "have no places .* --capacity before")
        assert_fails(kvfuse("resize", conf, "--capacity", "140MiB"), 1, "places for 6 segments")
        assert_clean(conf)
        one.mount()
        for name in sorted(contents)[20:]:
            (one.point / name).unlink()
            del contents[name]
        wait_until(lambda: kvfuse("resize", one.point, "--capacity", "45MiB").returncode == 0, "removed files to go")
        assert size_of(one.point) <= 45 * MIB
        verify(one.point, contents)
        one.unmount()
        assert_clean(conf)
        assert "1 devices" in resize(conf, "--remove-device", devices[2])
        assert_clean(conf)
        one.mount()
        verify(one.point, contents)
        one.unmount()
    finally:
        for mount in mounts:
            mount.remove()
