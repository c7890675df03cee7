"""A mount of a volume on real servers: names in etcd, bytes in RADOS or in files. It does what one of a folder does."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from cluster_lab import BYTES_OF_HOSTS, create_ceph_user, create_etcd_user, etcd_cluster
from mounting import KVFUSE, KvfuseMount, shared_conf, stopped, temporary_mount, wait_until

from kvfuse.cluster.ceph import CephServers
from kvfuse.cluster.etcd import EtcdServers, EtcdSettings
from kvfuse.options import config
from kvfuse.volume.opening import engines
from kvfuse.volume.store import schema

pytestmark = pytest.mark.root

SIZES = (0, 1, 4096, 70_001, 1 << 20, 9 << 20)


@pytest.fixture(params=BYTES_OF_HOSTS)
def conf(request: pytest.FixtureRequest, etcd: EtcdServers, tmp_path: Path) -> Path:
    """The mount.conf of a volume of the test's own; the parameter says where its bytes are."""
    ceph = request.getfixturevalue("ceph") if request.param == "rados" else None
    device = tmp_path / "device" if request.param == "block" else None
    if device is not None:
        with device.open("wb") as file:
            file.truncate(640 << 20)
    return shared_conf(tmp_path, etcd, ceph, device=device)


@pytest.fixture
def shared(conf: Path) -> Iterator[KvfuseMount]:
    with temporary_mount(source=conf) as mount:
        yield mount


def content(size: int) -> bytes:
    return (b"%d bytes, " % size * (size // 8 + 1))[:size]


def write(path: Path, size: int) -> None:
    """As engines do: a temporary name, then the rename."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_bytes(content(size))
    temporary.rename(path)


def remount(mount: KvfuseMount) -> None:
    mount.unmount()
    mount.mount()


def test_bytes_and_names_survive_a_remount(shared: KvfuseMount) -> None:
    folder = shared.point / "blocks"
    folder.mkdir(mode=0o750)
    for size in SIZES:
        write(folder / f"{size}", size)
    write(folder / "70001", 4096)
    (folder / "4096").rename(folder / "moved")
    (folder / "1").unlink()
    os.link(folder / "moved", shared.point / "linked")
    (shared.point / "symbolic").symlink_to("blocks/moved")
    os.setxattr(folder / "moved", "user.colour", b"blue")
    expected = {"0": 0, "70001": 4096, "1048576": 1 << 20, "9437184": 9 << 20, "moved": 4096}
    for _ in range(2):
        assert {path.name for path in folder.iterdir()} == expected.keys()
        for name, size in expected.items():
            assert (folder / name).read_bytes() == content(size), name
        assert (shared.point / "symbolic").read_bytes() == content(4096)
        assert (shared.point / "linked").stat().st_nlink == 2
        assert os.getxattr(shared.point / "linked", "user.colour") == b"blue"
        assert folder.stat().st_mode & 0o777 == 0o750
        remount(shared)


def test_writes_in_place(shared: KvfuseMount) -> None:
    path = shared.point / "file"
    expected = bytearray(content(5 << 20))
    path.write_bytes(expected)
    with path.open("r+b") as file:
        for offset in (0, 4095, (4 << 20) - 3, (5 << 20) - 1):
            file.seek(offset)
            file.write(b"changed")
            expected[offset : offset + 7] = b"changed"
        os.fsync(file.fileno())
    os.truncate(path, 3 << 20)
    os.truncate(path, 4 << 20)
    del expected[3 << 20 :]
    expected.extend(bytes(1 << 20))
    assert path.read_bytes() == expected
    remount(shared)
    assert path.read_bytes() == expected


def test_a_removed_file_is_readable_while_it_is_open(shared: KvfuseMount) -> None:
    path = shared.point / "file"
    path.write_bytes(content(70_001))
    with path.open("rb") as file:
        path.unlink()
        assert not path.exists()
        assert file.read() == content(70_001)


def test_many_names(shared: KvfuseMount) -> None:
    """More than one transaction of the record store takes."""
    names = {f"name-{number}" for number in range(400)}
    for name in names:
        (shared.point / name).touch()
    assert {path.name for path in shared.point.iterdir()} == names
    remount(shared)
    assert {path.name for path in shared.point.iterdir()} == names
    for name in names:
        (shared.point / name).unlink()
    assert list(shared.point.iterdir()) == []


def test_what_was_closed_survives_a_killed_daemon(shared: KvfuseMount) -> None:
    """Strict is the default: close returns after the commit. The next mount waits for the dead one's lease."""
    stats = json.loads((shared.point / ".kvfuse" / "stats").read_text())
    assert stats["records"]["commits"] > 0
    for number in range(5):
        write(shared.point / f"block-{number}", 300_000)
    shared.kill()
    shared.mount()
    for number in range(5):
        assert (shared.point / f"block-{number}").read_bytes() == content(300_000)


def test_a_daemon_that_was_stopped_for_too_long_goes_on_as_another_client(conf: Path, tmp_path: Path) -> None:
    """Its lease ended meanwhile, and others took over: what it had not committed is lost, and its writers hear so."""
    mount, other = KvfuseMount(tmp_path, source=conf), KvfuseMount(make_folder(tmp_path / "other"), source=conf)
    try:
        mount.mount()
        other.mount()
        write(mount.point / "before", 70_001)
        late = (mount.point / "late").open("wb", buffering=0)  # from here on no process is forked: it would close this
        late.write(content(70_001))
        with stopped(mount.pid):
            write(other.point / "meanwhile", 70_001)
            wait_until(lambda: client_count(conf) == 1, "the end of the lease")
        wait_until(lambda: client_count(conf) == 2, "the new lease")
        with pytest.raises(OSError, match="Input/output error"):
            os.fsync(late.fileno())
        with pytest.raises(OSError, match="Input/output error"):
            late.close()
        wait_until(lambda: writes(mount.point / "again"), "a write that succeeds")
        assert (mount.point / "meanwhile").read_bytes() == content(70_001)
        assert (other.point / "again").read_bytes() == content(70_001)
        other.unmount()
        mount.unmount()
    finally:
        other.remove()
        mount.remove()
    mount.mount()
    assert {path.name: path.stat().st_size for path in mount.point.iterdir()} == {
        "before": 70_001,
        "late": 0,
        "meanwhile": 70_001,
        "again": 70_001,
    }
    mount.unmount()
    mount.fsck()


def client_count(conf: Path) -> int:
    """Clients of the volume that the record store takes for alive."""

    async def count() -> int:
        async with engines.open_records(config.load(conf).options) as records:
            return len(await records.scan(schema.MEMBER_PREFIX))

    return trio.run(count)


def writes(path: Path) -> bool:
    """One attempt."""
    try:
        write(path, 70_001)
    except OSError as error:
        assert error.errno == errno.EIO
        return False
    return True


def make_folder(path: Path) -> Path:
    path.mkdir()
    return path


@pytest.fixture
def etcd_with_users() -> Iterator[EtcdServers]:
    with etcd_cluster(1, EtcdSettings(root_password="of-root")) as servers:
        yield servers


def test_a_tenants_keys_open_its_volume_alone(etcd_with_users: EtcdServers, ceph: CephServers, tmp_path: Path) -> None:
    """An etcd user for one prefix and a cephx user for one namespace suffice, and reach nothing else."""
    etcd = etcd_with_users
    create_etcd_user(etcd, "alice", "of-alice", b"/kvfuse/alice/")
    password = tmp_path / "password"
    password.write_text("of-alice\n")
    password.chmod(0o600)
    lines = [
        'records.user = "alice"',
        f'records.password_file = "{password}"',
        'segments.user = "alice"',
        f'segments.keyring = "{create_ceph_user(ceph, "alice", "alice")}"',
    ]
    own = shared_conf(tmp_path, etcd, ceph, "alice", lines)
    with temporary_mount(source=own) as mount:
        write(mount.point / "file", 70_001)
        remount(mount)
        assert (mount.point / "file").read_bytes() == content(70_001)
    for name, line in (("bob", ""), ("alice", 'segments.namespace = "bob"')):
        conf = shared_conf(tmp_path, etcd, ceph, name, [*lines, line])
        done = subprocess.run([*KVFUSE, "format", conf, "--force"], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (1, ""), f"{name} {line}"
        assert re.search("denied|does not allow|not permitted", done.stderr), done.stderr
        assert "of-alice" not in done.stderr


def test_the_commands_know_a_volume_without_a_folder(shared: KvfuseMount) -> None:
    def kvfuse(*arguments: str | Path) -> str:
        command = [*KVFUSE, *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    write(shared.point / "file", 70_001)
    (row,) = json.loads(kvfuse("status", shared.source, "--json"))
    assert (row["mountpoint"], row["problem"]) == (str(shared.point), None)
    assert json.loads(kvfuse("info", shared.point / "file", "--json"))["size"] == 70_001
    assert json.loads(kvfuse("stats", shared.point, "--json"))["pid"] == shared.pid
    found = {row["name"]: row for row in json.loads(kvfuse("doctor", shared.source, "--json"))}
    segments = "segments" if "segments" in found else str(shared.source.with_name("device"))
    assert (found["records"]["state"], found[segments]["state"]) == ("ok", "ok")
    assert "a volume, answers in" in found["records"]["detail"]
    done = subprocess.run([*KVFUSE, "fsck", shared.source], capture_output=True, text=True, check=False)
    assert (done.returncode, f"process {shared.pid} on " in done.stderr) == (4, True)
    done = subprocess.run([*KVFUSE, "format", shared.source, "--force"], capture_output=True, text=True, check=False)
    assert done.returncode == 4
