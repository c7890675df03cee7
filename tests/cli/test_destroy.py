"""`kvfuse destroy`: nothing of a volume is left in any engine, nothing else goes, and it may be killed anywhere."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from cli_lab import Place, assert_fails, kvfuse
from cluster_lab import rados
from loop_lab import loop_device
from mounting import KVFUSE, KvfuseMount, shared_conf, wait_until
from places import ROOT
from redis_lab import RedisServer, redis_server

from kvfuse.options import config
from kvfuse.usrbio.client import BlockStore
from kvfuse_cluster.etcd import EtcdServers

MIB = 1 << 20
SHAPE = 'volume.capacity = "40MiB"\nvolume.segment_size = "16MiB"\n'
KILLED = """
import os, sys, trio
from pathlib import Path
from kvfuse.options import config
from kvfuse.volume.opening.destroying import destroy
left = int(sys.argv[2])
def step(what):
    global left
    left -= 1
    if left < 0:
        print(what, flush=True)
        os._exit(9)
trio.run(destroy, config.load(Path(sys.argv[1])).options, step)
"""
"""destroys the volume of argument 1 and dies at once, as by SIGKILL, before the step of number argument 2"""


def destroyed(source: Path, name: str) -> str:
    done = kvfuse("destroy", source, "--yes", name)
    assert done.returncode == 0, done.stderr
    assert "destroyed the volume" in done.stdout
    return done.stdout + done.stderr


def fill(mount: KvfuseMount) -> None:
    """Files, a namespace of files, and blocks by key. Unmounted and sound at the end."""
    mount.mount()
    (mount.point / "file").write_bytes(b"kept" * 100_000)
    assert kvfuse("namespace", "create", mount.point / "blocks").returncode == 0
    with BlockStore(mount.point, "blocks") as store:
        for number in range(20):
            store.put(b"key %d" % number, b"block" * 10_000)
    mount.unmount()
    mount.fsck()


# -- in a folder ---------------------------------------------------------------------------------------


def test_it_shows_what_is_lost_and_needs_the_name(place: Place) -> None:
    place.mount()
    (place.point / "file").write_bytes(bytes(MIB))
    for source in (place.volume, place.point):
        assert_fails(kvfuse("destroy", source, "--yes", "volume"), 4, f"mounted on {place.point}: .*umount")
    assert kvfuse("umount", place.point).returncode == 0
    done = kvfuse("destroy", place.volume)
    assert_fails(done, 1, "nothing was removed: say --yes volume")
    rows = dict(line.strip().rsplit(maxsplit=1) for line in done.stdout.splitlines() if line.strip(" ─"))
    assert (rows["files"], rows["bytes of files"], rows["namespaces"]) == ("1", "1MiB", "1")
    assert_fails(kvfuse("destroy", place.volume, "--yes", "other"), 1, "is called volume, not other")
    destroyed(place.volume, "volume")
    assert not place.volume.exists()
    place.mount()
    assert os.listdir(place.point) == []
    assert kvfuse("umount", place.point).returncode == 0


@pytest.mark.parametrize(("answer", "is_gone"), [("no", False), ("volume", True)])
def test_a_terminal_is_asked_for_the_name(place: Place, answer: str, is_gone: bool) -> None:
    assert kvfuse("format", place.volume, "--capacity", "40MiB").returncode == 0
    ours, theirs = pty.openpty()
    os.write(ours, f"{answer}\n".encode())
    done = subprocess.run(
        [*KVFUSE, "destroy", place.volume],
        stdin=theirs,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    os.close(ours)
    os.close(theirs)
    assert (done.returncode == 0) == is_gone, done.stderr
    assert place.volume.exists() != is_gone


def test_what_is_no_volume_or_not_its_own_stays(place: Place) -> None:
    stranger = place.base / "stranger"
    stranger.mkdir()
    (stranger / "data.mdb").write_bytes(b"not ours")
    for source, status in ((stranger, 3), (place.base / "absent", 3), (place.point, 3)):
        assert_fails(kvfuse("destroy", source, "--yes", source.name), status, "is no kvfuse volume")
    assert kvfuse("format", place.volume, "--capacity", "40MiB").returncode == 0
    ours = [place.volume / name for name in ("notes", "segments/notes", "records/notes")]
    for path in ours:
        path.write_bytes(b"foreign")
    said = destroyed(place.volume, "volume")
    assert str(ours[0]) in said
    assert sorted(path for path in place.volume.rglob("*") if path.is_file()) == sorted(ours)
    assert (stranger / "data.mdb").read_bytes() == b"not ours"


def test_segments_of_another_volume_are_noticed_before_anything_goes(place: Place) -> None:
    """mount.conf names its folder."""
    for name in ("one", "two"):
        conf = place.base / f"{name}.conf"
        conf.write_text(
            f'volume.path = "{place.base / name}"\nsegments.path = "{place.base / f"bytes-{name}"}"\n{SHAPE}'
        )
        assert kvfuse("mount", conf, place.point).returncode == 0
        (place.point / "file").write_bytes(bytes(MIB))
        assert kvfuse("umount", place.point).returncode == 0
    wrong = place.base / "wrong.conf"
    wrong.write_text((place.base / "one.conf").read_text().replace("bytes-one", "bytes-two"))
    assert_fails(kvfuse("destroy", wrong, "--yes", "one"), 3, "segment 0 is of the volume .* nothing was removed")
    for name in ("one", "two"):
        assert kvfuse("fsck", "--verify", place.base / f"{name}.conf").returncode == 0
        destroyed(place.base / f"{name}.conf", name)
        assert os.listdir(place.base / f"bytes-{name}") == []


@pytest.mark.parametrize("number", range(4))
def test_one_that_was_killed_is_gone_on_with(place: Place, number: int) -> None:
    """Before a step of this number: of those after the first one the volume is closed to all."""
    place.mount()
    (place.point / "file").write_bytes(bytes(MIB))
    assert kvfuse("umount", place.point).returncode == 0
    killed_before(place.volume, number)
    if number == 0:
        assert kvfuse("fsck", place.volume).returncode == 0
    elif number < 3:
        for command in (
            ("mount", place.volume, place.point),
            ("format", place.volume, "--force"),
            ("fsck", place.volume),
        ):
            assert_fails(kvfuse(*command), 3, "was being destroyed, and a part is left: 'kvfuse destroy'")
    if number < 3:
        said = destroyed(place.volume, "volume")
        assert ("goes on with it" in said) == (number > 0)
    assert not place.volume.exists()


def killed_before(source: Path, number: int) -> str:
    """The step that it died before; empty: it had fewer."""
    done = subprocess.run(
        [sys.executable, "-c", KILLED, source, str(number)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode in (0, 9), done.stderr
    return done.stdout.strip()


# -- on devices ----------------------------------------------------------------------------------------


@pytest.fixture
def devices(tmp_path: Path) -> Iterator[list[Path]]:
    with ExitStack() as stack:
        yield [stack.enter_context(loop_device(tmp_path / name, 56 * MIB)) for name in ("a", "b", "c")]


def on_devices(place: Place, devices: list[Path]) -> Path:
    conf = place.base / "mount.conf"
    paths = json.dumps([str(path) for path in devices])
    conf.write_text(f'volume.path = "{place.volume}"\n{SHAPE}segments.engine = "block"\nsegments.devices = {paths}\n')
    return conf


def signatures(device: Path) -> str:
    return subprocess.run(["wipefs", "--noheadings", device], capture_output=True, text=True, check=True).stdout


@pytest.mark.root
@pytest.mark.parametrize("number", [1, 2, 3, 4, 5])
def test_devices_can_be_used_for_anything_afterwards(place: Place, devices: list[Path], number: int) -> None:
    """Also one that joined later and is not in mount.conf, and when it was killed before any step."""
    conf = on_devices(place, devices[:2])
    assert kvfuse("format", conf).returncode == 0
    done = kvfuse("resize", conf, "--add-device", devices[2])
    assert done.returncode == 0, done.stderr
    subprocess.run(["mkfs.ext4", "-q", other := place.base / "other", "20M"], check=True)
    before = other.read_bytes()
    killed_before(conf, number)
    if number < 5:
        destroyed(conf, "volume")
    assert not place.volume.exists()
    for device in devices:
        assert not any(device.read_bytes()[:MIB])
        assert signatures(device) == ""
    assert other.read_bytes() == before
    assert kvfuse("format", on_devices(place, devices)).returncode == 0
    destroyed(conf, "volume")


@pytest.mark.root
def test_a_device_that_is_lost_has_to_be_named_lost(place: Place, devices: list[Path]) -> None:
    conf = on_devices(place, devices[:2])
    assert kvfuse("format", conf).returncode == 0
    with devices[1].open("r+b") as device:
        label = device.read(MIB)
        device.seek(0)
        device.write(b"other" * 100_000)
    assert_fails(kvfuse("destroy", conf, "--yes", "volume"), 3, "2 devices, and .* is not among them")
    done = kvfuse("destroy", conf, "--yes", "volume", "--lost-devices")
    assert done.returncode == 0, done.stderr
    assert not any(devices[0].read_bytes()[:MIB])
    with devices[1].open("r+b") as device:
        assert device.read(5) == b"other", label[:5]


# -- shared --------------------------------------------------------------------------------------------


def keys_left(etcd: EtcdServers, name: str) -> list[bytes]:
    """The kinds of all of etcd's keys of the volume, but markers of stores, which go by themselves."""
    prefix = f"/kvfuse/{name}/"
    command = ["etcdctl", "--endpoints", ",".join(etcd.endpoints), "get", "--prefix", prefix, "--keys-only"]
    done = subprocess.run(command, capture_output=True, check=True, env={**os.environ, "ETCDCTL_API": "3"})
    return [kind for kind in re.findall(re.escape(prefix.encode()) + rb"(\w+)/", done.stdout) if kind != b"m"]


@pytest.mark.root
@pytest.mark.parametrize("engine", ["file", "block", "redis", "rados"])
def test_nothing_is_left_of_a_shared_volume(
    tmp_path: Path, etcd: EtcdServers, engine: str, request: pytest.FixtureRequest
) -> None:
    """Bytes in files or on a device with the index in etcd; with the index in Redis; bytes and index in RADOS."""
    with ExitStack() as stack:
        ceph = request.getfixturevalue("ceph") if engine == "rados" else None
        server = stack.enter_context(redis_server()) if engine == "redis" else None
        device = stack.enter_context(loop_device(tmp_path / "image", 300 * MIB)) if engine == "block" else None
        lines = [f'index.engine = "redis"\nindex.url = "{server.url}"'] if server is not None else []
        conf = shared_conf(tmp_path, etcd, ceph, lines=lines, device=device)
        conf.write_text(conf.read_text().replace("512MiB", "200MiB"))
        name = config.load(conf).options.volume.name
        others = shared_conf(make(tmp_path / "beside"), etcd, ceph, name=name + "x")
        assert kvfuse("format", others).returncode == 0
        kept = keys_left(etcd, name + "x")
        mounts = [KvfuseMount(make(tmp_path / part), source=conf) for part in ("one", "two")]
        for mount in mounts:
            stack.callback(mount.remove)
        fill(mounts[0])
        assert keys_left(etcd, name)
        assert server is None or redis_keys(server)
        assert ceph is None or len(rados(ceph, name, "ls").split()) > 3
        for mount in mounts:
            mount.mount()
        assert_fails(kvfuse("destroy", conf, "--yes", name), 4, f"is mounted on {mounts[0].point}")
        copy = tmp_path / "copy.conf"  # as a host that has it not mounted
        copy.write_text(conf.read_text())
        done = kvfuse("destroy", copy, "--yes", name)
        assert done.returncode == 4, done.stderr
        for mount in mounts:
            assert re.search(f"process {mount.pid} on .*mounted on {mount.point}", done.stderr), done.stderr
        for mount in mounts:
            mount.unmount()
        destroyed(copy, name)
        assert keys_left(etcd, name) == []
        assert keys_left(etcd, name + "x") == kept
        assert server is None or redis_keys(server) == 0
        assert ceph is None or rados(ceph, name, "ls") == ""
        assert ceph is not None or device is not None or os.listdir(tmp_path / "segments") == []
        assert device is None or not any(device.read_bytes()[:MIB])
        assert_fails(kvfuse("destroy", conf, "--yes", name), 3, "holds no kvfuse volume")
        mounts[1].mount()
        assert os.listdir(mounts[1].point) == []
        mounts[1].unmount()
        mounts[1].fsck()
        destroyed(conf, name)


def redis_keys(server: RedisServer) -> int:
    command = ["redis-cli", "-u", server.url, "dbsize"]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def make(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    return folder


@pytest.mark.root
@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_shared_one_that_was_killed_is_gone_on_with(tmp_path: Path, etcd: EtcdServers, number: int) -> None:
    conf = shared_conf(tmp_path, etcd)
    name = config.load(conf).options.volume.name
    mount = KvfuseMount(tmp_path, source=conf)
    try:
        fill(mount)
        assert killed_before(conf, number)
        for command in (("mount", conf, mount.point), ("format", conf, "--force"), ("fsck", conf)):
            assert_fails(kvfuse(*command), 3, "was being destroyed, and a part is left: 'kvfuse destroy'")
        assert "goes on with it" in destroyed(conf, name)
        assert keys_left(etcd, name) == []
        mount.mount()
        assert os.listdir(mount.point) == []
        mount.unmount()
    finally:
        mount.remove()


@pytest.mark.root
def test_a_host_that_was_killed_is_waited_for(tmp_path: Path, etcd: EtcdServers) -> None:
    """Its last writes are over, or cut off, before its device is anybody's: here by the quarantine."""
    with loop_device(tmp_path / "image", 300 * MIB) as device:
        conf = shared_conf(tmp_path, etcd, device=device)
        conf.write_text(conf.read_text().replace("512MiB", "200MiB"))
        name = config.load(conf).options.volume.name
        mount = KvfuseMount(tmp_path, source=conf)
        try:
            mount.mount()
            (mount.point / "file").write_bytes(b"kept" * 100_000)
            os.kill(mount.pid, signal.SIGKILL)
            mount.remove()
            wait_until(lambda: kvfuse("fsck", conf).returncode != 4, "the end of its lease")
            destroyed(conf, name)
            assert keys_left(etcd, name) == []
            assert not any(device.read_bytes()[:MIB])
        finally:
            mount.remove()
