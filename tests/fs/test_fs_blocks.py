"""Directories of blocks through a real mount: the tools that people use on files, and rings beside them."""

from __future__ import annotations

import errno
import json
import mmap
import os
import random
import subprocess
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
from mounting import KVFUSE, KvfuseMount, wait_until
from posix_calls import RENAME_EXCHANGE, fails, renameat2

from kvfuse.usrbio.client import connect
from kvfuse.usrbio.client.block_store import BlockStore

pytestmark = [pytest.mark.ring(2), pytest.mark.engines("lmdb+file")]

NAMESPACE = "user.kvfuse.namespace"
BLOCK_INODES = 1 << 62
SIZES = 1, 100, 4096, 65536, 300_000


@pytest.fixture
def folder(mount: KvfuseMount) -> Path:
    folder = mount.point / "kv"
    folder.mkdir()
    os.setxattr(folder, NAMESPACE, b"kind=blocks")
    folder.chmod(0o777)
    return folder


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Files of many sizes, and folders, which are no blocks."""
    seed, base = random.Random(3), tmp_path / "tree"
    for number in range(60):
        path = base / f"folder-{number % 4}" / f"file-{number}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(seed.randbytes(SIZES[number % len(SIZES)]))
    (base / "empty").touch()
    (base / "link").symlink_to("folder-0")
    return base


def run(*command: object) -> str:
    found = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stderr
    return found.stdout


def kind(path: Path) -> str:
    """block or file"""
    return str(json.loads(os.getxattr(path, "kvfuse.info")).get("kind", "file"))


def get(store: BlockStore, name: str) -> bytes | None:
    found = store.get(name.encode())
    return bytes(found) if found is not None else None


def test_both_doors_see_the_same(mount: KvfuseMount, folder: Path) -> None:
    with BlockStore(mount.point, "kv") as store:
        (folder / "file").write_bytes(b"by file")
        assert get(store, "file") == b"by file"
        store.put(b"key", b"by ring")
        assert (folder / "key").read_bytes() == b"by ring"
        assert sorted(os.listdir(folder)) == ["file", "key"]
        assert (folder / "key").stat().st_ino >= BLOCK_INODES
        assert kind(folder / "key") == kind(folder / "file") == "block"
        with (folder / "key").open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapping:
            store.put(b"key", b"another")
            assert (folder / "key").read_bytes() == b"another"
            (folder / "file").rename(folder / "key")
            assert get(store, "key") == b"by file"
            assert (folder / "key").read_bytes() == b"by file"
            assert bytes(mapping) == b"by ring"
            assert os.pread(file.fileno(), 100, 3) == b"ring"
        store.delete(b"key")
        assert os.listdir(folder) == []
        assert not (folder / "key").exists()
        folder.rmdir()


def test_tools_of_files(mount: KvfuseMount, folder: Path, tree: Path) -> None:
    run("cp", "-a", tree, folder / "copied")
    run("diff", "-r", tree, folder / "copied")
    run("rsync", "-a", "--checksum", f"{tree}/", folder / "synced")
    run("rsync", "-a", "--checksum", f"{tree}/", folder / "synced")
    run("diff", "-r", tree, folder / "synced")
    run("tar", "-C", folder, "-cf", tree.parent / "made.tar", "copied")
    run("tar", "-C", folder / "synced", "-xf", tree.parent / "made.tar")
    run("diff", "-r", tree, folder / "synced" / "copied")
    run("mv", folder / "copied" / "folder-1" / "file-1", folder / "copied" / "folder-2" / "moved")
    assert (folder / "copied" / "folder-2" / "moved").read_bytes() == (tree / "folder-1" / "file-1").read_bytes()
    assert len(run("find", folder, "-type", "f").splitlines()) == 3 * 61
    with BlockStore(mount.point, "kv/copied/folder-3") as store:
        assert get(store, "file-3") == (tree / "folder-3" / "file-3").read_bytes()
    run("rm", "-r", folder / "copied", folder / "synced")
    assert os.listdir(folder) == []


def test_calls_of_writers(mount: KvfuseMount, folder: Path) -> None:
    path = folder / "name"
    with BlockStore(mount.point, "kv") as store:
        with path.open("xb") as file:
            file.write(b"0123456789")
            file.flush()
            with fails(errno.EEXIST):
                os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
            assert path.read_bytes() == b"0123456789"
            assert get(store, "name") is None
        assert get(store, "name") == b"0123456789"
        with path.open("ab") as file:
            file.write(b"ab")
            file.flush()
            assert os.fstat(file.fileno()).st_size == 12
        with path.open("r+b") as file:
            file.seek(-2, os.SEEK_END)
            file.write(b"xyz")
            file.flush()
            os.fsync(file.fileno())
            assert get(store, "name") == b"0123456789xyz"
            os.ftruncate(file.fileno(), 4)
            file.seek(2)
            assert file.read() == b"23"
        assert get(store, "name") == b"0123"
        os.truncate(path, 6)
        assert get(store, "name") == b"0123\0\0"
        with path.open("wb") as file:
            path.unlink()
            file.write(b"nameless")
        assert not path.exists()
        run("sh", "-c", f"echo one > {path}; echo two >> {path}")
        assert get(store, "name") == b"one\ntwo\n"
        with path.open("w+b") as file:
            file.truncate(8192)
            mapping = mmap.mmap(file.fileno(), 8192)
        mapping[:5] = b"early"
        mapping.flush()
        mapping[5000:5004] = b"late"
        mapping.close()
        wait_until(lambda: (get(store, "name") or b"")[5000:5004] == b"late", "the end of the mapping")
        assert path.read_bytes()[:5] == b"early"


def test_two_users(mount: KvfuseMount, folder: Path) -> None:
    def as_user(uid: int, script: str) -> int:
        return subprocess.run(
            ["sh", "-c", script], user=uid, group=uid, timeout=60, stderr=subprocess.DEVNULL
        ).returncode

    assert as_user(1001, f"umask 077; echo mine > {folder}/one; echo all > {folder}/two; chmod 644 {folder}/two") == 0
    found = (folder / "one").stat()
    assert (found.st_uid, found.st_gid, found.st_mode & 0o777) == (1001, 1001, 0o600)
    assert kind(folder / "one") == "block"
    assert as_user(1002, f"cat {folder}/one") != 0
    assert as_user(1002, f"cat {folder}/two") == 0
    assert as_user(1002, f"echo more >> {folder}/two") != 0
    assert as_user(1002, f"chmod 666 {folder}/two") != 0
    assert as_user(1002, f"echo theirs > {folder}/tmp && mv -f {folder}/tmp {folder}/two") == 0
    assert (folder / "two").stat().st_uid == 1002
    assert (folder / "two").read_bytes() == b"theirs\n"
    os.chown(folder / "two", 1001, 1001)
    assert as_user(1001, f"echo more >> {folder}/two") == 0
    assert sorted(os.listdir(folder)) == ["one", "two"]
    folder.chmod(0o1777)
    assert as_user(1002, f"rm -f {folder}/one") != 0
    assert as_user(1001, f"rm {folder}/one {folder}/two") == 0


def test_what_stays_an_ordinary_file(mount: KvfuseMount, folder: Path) -> None:
    (folder / "large").write_bytes(large := os.urandom(80 << 20))
    (folder / "block").write_bytes(b"block")
    os.link(folder / "block", folder / "second")
    os.mkfifo(folder / "fifo")
    (folder / "attributes").write_bytes(b"attributes")
    os.setxattr(folder / "attributes", "user.name", b"value")
    assert os.getxattr(folder / "attributes", "user.name") == b"value"
    assert (folder / "large").read_bytes() == large
    for path in folder.iterdir():
        assert path.name == "fifo" or kind(path) == "file", path
    assert (folder / "block").samefile(folder / "second")
    assert (folder / "block").read_bytes() == b"block"
    mount.unmount()
    mount.mount()
    assert sorted(os.listdir(folder)) == ["attributes", "block", "fifo", "large", "second"]
    with BlockStore(mount.point, "kv") as store:
        assert get(store, "attributes") == b"attributes"
        store.put(b"attributes", b"a block")
        assert (folder / "attributes").read_bytes() == b"a block"


def test_a_file_that_a_ring_has_is_known_by_its_new_number(mount: KvfuseMount, folder: Path) -> None:
    """Also where another block takes the name between the client's open and the daemon's look."""
    path = folder / "name"
    with BlockStore(mount.point, "kv") as store, connect(mount.point) as client:
        store.put(b"name", b"former")
        request, replacing = client.session.request, Mock()

        def replace_first(*arguments: Any, **words: Any) -> Any:
            if not replacing.called:
                replacing()
                store.put(b"name", b"latter")
            return request(*arguments, **words)

        with patch.object(client.session, "request", replace_first), client.file(path) as file:
            assert replacing.called
            assert file.inode == path.stat().st_ino < BLOCK_INODES
            with client.iov(4096) as iov, client.ring(8) as ring:
                ring.prep_read(iov, 0, file, 0, 4096)
                ring.submit()
                assert ring.wait(1)["result"].tolist() == [6]
                assert bytes(iov.array[:6]) == b"latter"


def test_blocks_count(mount: KvfuseMount, folder: Path) -> None:
    before = os.statvfs(mount.point)
    for number in range(20):
        (folder / str(number)).write_bytes(bytes(1 << 20))

    def used() -> int:
        return (before.f_bfree - os.statvfs(mount.point).f_bfree) * before.f_frsize

    assert 20 << 20 <= used() <= 21 << 20, "slabs that are being lent are free, before and after"
    shown = run(*KVFUSE, "namespace", "usage", folder)
    assert "20" in shown
    mount.unmount()
    mount.mount()
    assert len(list(folder.iterdir())) == 20


def count_lookups(mount: KvfuseMount) -> int:
    return int(json.loads((mount.point / ".kvfuse/stats").read_text())["fs"]["requests"]["lookup"])


def test_lookups_do_not_grow_with_the_depth(mount: KvfuseMount, folder: Path) -> None:
    deepest, lookups = folder, []
    for _ in range(3):
        before = count_lookups(mount)
        for _ in range(20):
            deepest /= "d"
            deepest.mkdir()
            (deepest / "file").touch()
        lookups.append(count_lookups(mount) - before)
    assert max(lookups) <= 3 * 20 + 5, lookups
    before = count_lookups(mount)
    assert len(list(os.walk(folder))) == 61
    assert count_lookups(mount) - before <= 10


def test_a_name_that_meant_a_directory(mount: KvfuseMount, folder: Path) -> None:
    with BlockStore(mount.point, "kv") as store:
        for name in ("removed", "renamed", "exchanged"):
            (folder / name).mkdir()
        assert all((folder / name).is_dir() for name in os.listdir(folder))
        (folder / "removed").rmdir()
        (folder / "renamed").rename(folder / "other")
        for name in ("removed", "renamed"):
            assert not (folder / name).exists()
            store.put(name.encode(), name.encode())
            assert (folder / name).read_bytes() == name.encode()
        (folder / "file").mkdir()
        (folder / "file").rmdir()
        (folder / "file").write_bytes(b"by file")
        store.put(b"file", b"by ring")
        assert (folder / "file").read_bytes() == b"by ring"
        renameat2(folder / "exchanged", folder / "file", RENAME_EXCHANGE)
        assert (folder / "file").is_dir()
        assert (folder / "exchanged").read_bytes() == b"by ring"
        store.put(b"exchanged", b"again")
        assert (folder / "exchanged").read_bytes() == b"again"
