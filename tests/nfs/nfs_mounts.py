"""The kernel's NFS client over nfs-ganesha, and over the kernel's server, both over a mount.

In the machine of scripts/rdma-vm, where `test_nfs_machine` runs this: few kernels have an NFS client and server.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from mounting import KvfuseMount, temporary_mount
from nfs_lab import PSEUDO, Ganesha, KernelServer, client, load_modules
from places import ROOT

DIFFERENT = "exchange", "noreplace", "over_an_open_file"
"""POSIX tests of what NFS does in another way: renames have no flags, and an open file that is removed keeps a name"""
WORDS = ("export", "allow_other", "capacity=256MiB")
SIZE_MAX = 600_000


class Served:
    """A mount, its server, and the folder where a client has it."""

    def __init__(self, mount: KvfuseMount, server: Ganesha | KernelServer, name: str, point: Path) -> None:
        self.mount, self.server, self.name, self.point = mount, server, name, point


@pytest.fixture(scope="module", params=["ganesha", "kernel"])
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    load_modules()
    with tempfile.TemporaryDirectory() as folder, temporary_mount(WORDS) as mount, ExitStack() as stack:
        server: Ganesha | KernelServer
        if request.param == "ganesha":
            server = Ganesha(mount.point, Path(folder, "ganesha"), graceless=False, own=False)
        else:
            server = KernelServer(mount.point)
        stack.callback(server.close)
        server.start()
        point = Path(folder, "client")
        point.mkdir()
        yield Served(mount, server, PSEUDO if request.param == "ganesha" else "", point)


@pytest.fixture
def folder(served: Served) -> Iterator[Path]:
    with client(served.name, served.point) as point:
        yield Path(tempfile.mkdtemp(dir=point))


def there(served: Served, path: Path) -> Path:
    """The same file on the mount itself."""
    return served.mount.point / path.relative_to(served.point)


@pytest.mark.parametrize("version", ["4.0", "4.1", "4.2"])
def test_each_version_serves_programs(served: Served, version: str, rng: random.Random) -> None:
    content = rng.randbytes(3_000_000)
    with client(served.name, served.point, version) as point:
        folder = Path(tempfile.mkdtemp(dir=point))
        (folder / "file").write_bytes(content)
        assert there(served, folder / "file").read_bytes() == content
        with (folder / "file").open("r+b") as file:
            file.seek(1_000_000)
            file.write(b"changed")
            os.fsync(file.fileno())
        there(served, folder / "by-mount").write_bytes(b"seen at the next open")
        assert (folder / "by-mount").read_bytes() == b"seen at the next open"
        os.link(folder / "file", folder / "link")
        os.symlink("file", folder / "symlink")
        os.rename(folder / "link", folder / "moved")
        (folder / "sub").mkdir()
        assert os.stat(folder / "moved").st_nlink == 2
        assert sorted(os.listdir(folder)) == ["by-mount", "file", "moved", "sub", "symlink"]
        assert sorted(os.listdir(there(served, folder))) == sorted(os.listdir(folder))
        os.unlink(folder / "file")
        with pytest.raises(FileNotFoundError):
            (folder / "symlink").read_bytes()
        expected = content[:1_000_000] + b"changed" + content[1_000_007:]
        assert (folder / "moved").read_bytes() == expected


def test_random_writes_cuts_and_maps_read_back(served: Served, folder: Path, rng: random.Random) -> None:
    """As fsx does it: one file, whose bytes a model has, too."""
    model = b""
    path = folder / "file"
    path.touch()
    for _ in range(150):
        fd = os.open(path, os.O_RDWR)
        offset, size = rng.randrange(SIZE_MAX), rng.randrange(1, 70_000)
        kind = rng.choice(["write", "write", "read", "cut", "map", "sync"])
        if kind == "write":
            part = rng.randbytes(size)
            os.pwrite(fd, part, offset)
            model = model[:offset].ljust(offset, b"\0") + part + model[offset + size :]
        elif kind == "read":
            assert os.pread(fd, size, offset) == model[offset : offset + size]
        elif kind == "cut":
            os.ftruncate(fd, offset)
            model = model[:offset].ljust(offset, b"\0")
        elif kind == "map" and model:
            with mmap.mmap(fd, len(model)) as mapping:
                at = rng.randrange(len(model))
                mapping[at : at + 1] = b"m"
                model = model[:at] + b"m" + model[at + 1 :]
        elif kind == "sync":
            os.fsync(fd)
        os.close(fd)
        assert os.stat(path).st_size == len(model)
    assert path.read_bytes() == model
    assert there(served, path).read_bytes() == model


def test_programs_side_by_side_leave_what_they_made(served: Served, folder: Path, seed: int) -> None:
    """Small files that are made, renamed over each other and removed, by threads that have folders of their own."""
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            rng, files, base = random.Random(f"{seed} {number}"), dict[str, bytes](), folder / str(number)
            base.mkdir()
            for step in range(60):
                name = rng.choice("abcdef")
                if files and rng.random() < 0.2:
                    gone = rng.choice(sorted(files))
                    os.unlink(base / gone)
                    del files[gone]
                else:
                    files[name] = rng.randbytes(rng.randrange(100_000))
                    (base / f"{step}.new").write_bytes(files[name])
                    os.rename(base / f"{step}.new", base / name)
            for place in (base, there(served, base)):
                assert {path.name: path.read_bytes() for path in place.iterdir()} == files
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


def test_names_do_as_posix_says(served: Served, folder: Path) -> None:
    """By the tests of the mount itself."""
    for place in (served.mount.point, folder):
        place.chmod(0o777)
    files = [f"tests/posix/{name}.py" for name in ("test_create", "test_rename")]
    words = ["-k", " and ".join(f"not {name}" for name in DIFFERENT), "-p", "no:cacheprovider", "-p", "no:xdist"]
    command = [sys.executable, "-m", "pytest", *files, *words, "--timeout=0", "-q", "--folder", str(folder)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout


def test_locks_hold_among_clients_of_the_server(folder: Path) -> None:
    (folder / "lock").touch()
    command = ["flock", "--nonblock", str(folder / "lock"), "true"]
    with (folder / "lock").open("r+b") as file:
        taken = subprocess.run(["flock", "--exclusive", str(file.fileno())], pass_fds=[file.fileno()], timeout=120)
        assert taken.returncode == 0
        assert subprocess.run(command, timeout=120).returncode != 0
    assert subprocess.run(command, timeout=120).returncode == 0


@pytest.mark.parametrize("is_remounted", [False, True], ids=["server", "server and mount"])
def test_open_files_go_on_after_a_restart(served: Served, folder: Path, rng: random.Random, is_remounted: bool) -> None:
    content = rng.randbytes(500_000)
    (folder / "read").write_bytes(content)
    with (folder / "written").open("w+b", buffering=0) as file, (folder / "read").open("rb") as read:
        assert read.read(10) == content[:10]
        file.write(b"before ")
        os.fsync(file.fileno())
        served.server.end(signal.SIGKILL)
        if is_remounted:
            served.mount.unmount()
            served.mount.mount()
        served.server.start()
        file.write(b"after")
        os.fsync(file.fileno())
        file.seek(0)
        assert file.read() == b"before after"
        os.posix_fadvise(read.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        rest = read.read()
        assert hashlib.sha256(content[:10] + rest).digest() == hashlib.sha256(content).digest()
    (folder / "new").write_bytes(b"new")
    assert there(served, folder / "new").read_bytes() == b"new"
