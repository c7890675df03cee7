"""`kvfuse dump` and `kvfuse load`: what a dump has is made in another volume, and what it has not is named."""

from __future__ import annotations

import json
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_lab import Place, a_place, assert_fails, kvfuse

from kvfuse.usrbio.client import BlockStore

Rows = dict[str, dict[str, Any]]
ODD = os.fsdecode(b'odd\xff \x1b[31m\n"name"')


def fill(point: Path) -> None:
    (point / "plain" / "deep").mkdir(parents=True)
    os.setxattr(point / "plain", "user.kvfuse.publish", b"strict")
    os.setxattr(point / "plain", "user.other", bytes(range(256)))
    (point / "plain" / "strict").mkdir(mode=0o700)
    (point / "plain" / ODD).touch()
    (point / "plain" / "file").write_bytes(b"bytes")
    (point / "plain" / "again").hardlink_to(point / "plain" / "file")
    (point / "plain" / "link").symlink_to("/elsewhere/\udcff")
    os.mkfifo(point / "plain" / "pipe", 0o640)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(point / "plain" / "socket"))
    words = ["--kind", "files", "--capacity", "20MiB", "--bandwidth", "1GiB"]
    assert kvfuse("namespace", "create", point / "files", *words).returncode == 0
    words = ["--ttl", "3600", "--descriptor", '{"model": "m 1"}']
    assert kvfuse("namespace", "create", point / "files" / "inner", *words).returncode == 0
    token = kvfuse("namespace", "set", point / "files", "token=generate").stdout.strip()
    with BlockStore(point, "files/inner", create=False, token=token) as store:
        store.put(b"key", b"block")
    os.utime(point / "files" / "inner", ns=(10**18, 10**18))
    if os.geteuid() == 0:
        os.chown(point / "plain" / "deep", 1234, 4321)
        os.mknod(point / "plain" / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))


def dumped(*words: str | Path) -> tuple[Rows, str]:
    """(lines by their path, what was said)"""
    done = kvfuse("dump", *words)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines[0]["type"] == "kvfuse-dump"
    assert lines[-1] == {"type": "end", "lines": len(lines) - 1}
    return {line["path"]: line for line in lines[1:-1]}, done.stderr


def loaded(point: Path, file: Path) -> str:
    done = kvfuse("load", point, file)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def full(place: Place) -> Iterator[Place]:
    place.mount()
    fill(place.point)
    yield place
    place.end_sound()


def test_a_dump_of_a_dump_that_was_loaded_is_the_same(full: Place) -> None:
    file = full.base / "dump.jsonl"
    before, said = dumped(full.point)
    assert "without tokens of 1 namespace" in said
    assert kvfuse("dump", full.point, "-o", file).returncode == 0
    with a_place() as other:
        other.mount()
        text = loaded(other.point, file)
        assert "made 2 namespaces, 5 folders, " in text
        assert "1 empty file" in text
        assert "left out, as a dump has no bytes: 2 files, 1 further name of a file" in text
        assert "secrets ('kvfuse namespace set PATH token=generate'): 1 token" in text
        after, _ = dumped(other.point)
        for path, line in before.items():
            if line["type"] == "file" and line["size"]:
                assert path not in after
            elif path != "/" and line.get("kind") != "socket":
                if path == "/files":
                    assert line["namespace"]["token"] == "set"
                    line["namespace"]["token"] = "none"
                    assert line["mode"] & 0o077 == 0  # nobody but the owner comes in without the token
                assert after[path] == line
        assert "left out, as it is there already: 5 folders" in loaded(other.point, file)
        assert kvfuse("umount", other.point).returncode == 0
        assert kvfuse("fsck", "--verify", other.volume).returncode == 0


def test_no_secret_and_no_bytes_are_in_it(place: Place) -> None:
    place.mount()
    assert kvfuse("namespace", "create", place.point / "secret").returncode == 0
    token = kvfuse("namespace", "set", place.point / "secret", "token=generate").stdout.strip()
    (place.point / "file").write_bytes(b"very private bytes")
    done = kvfuse("dump", place.point)
    assert len(token) >= 16
    assert token not in done.stdout
    assert "private" not in done.stdout
    (line,) = [line for line in map(json.loads, done.stdout.splitlines()) if line.get("path") == "/secret"]
    assert line["namespace"]["token"] == "set"


def test_a_volume_that_is_not_mounted_and_a_folder_in_a_mount(full: Place) -> None:
    mounted, _ = dumped(full.point)
    by_volume, _ = dumped(full.volume)
    assert by_volume == mounted
    part, _ = dumped(full.point / "plain")
    assert {f"/plain{path.removeprefix('/') and path}" for path in part} == {
        p for p in mounted if p.startswith("/plain")
    }
    folders, _ = dumped(full.point, "--folders")
    assert {line["type"] for line in folders.values()} == {"folder"}
    assert kvfuse("umount", full.point).returncode == 0
    unmounted, _ = dumped(full.volume)
    assert unmounted == mounted
    assert not full.is_mounted
    assert kvfuse("fsck", full.volume).returncode == 0
    assert_fails(kvfuse("dump", full.base), 3, "is no kvfuse volume")


def test_what_is_no_whole_dump_is_refused(place: Place) -> None:
    place.mount()
    done = kvfuse("dump", place.point)
    lines = done.stdout.splitlines()
    newer = lines[0].replace('"version": 1', '"version": 2')
    wrong = '{"type": "foldr", "path": "/x", "mode": 448, "uid": 0, "gid": 0, "mtime": 0}'
    more = wrong.replace("foldr", "folder").replace("448", '448, "colour": 1')
    above = wrong.replace("foldr", "folder").replace("/x", "/../x")
    for content, message in (
        ([], "ends after 0 lines without its last one"),
        (["nonsense"], "line 1: "),
        (lines[1:], "line 1: this is no dump of kvfuse"),
        ([newer, *lines[1:]], "is of version 2, this program reads 1"),
        (lines[:-1], "ends after 2 lines without its last one"),
        ([lines[0], lines[-1]], "had 2 lines before this one, here are 1"),
        ([*lines[:2], lines[0]], "a second dump begins"),
        ([*lines[:2], wrong], "line 3: .*did you mean 'folder'"),
        ([*lines[:2], more], "line 3: .*colour"),
        ([*lines[:2], above], r"'/../x': they begin with a slash, and have no '\.' and '\.\.'"),
    ):
        file = place.base / "dump"
        file.write_text("".join(line + "\n" for line in content))
        assert_fails(kvfuse("load", place.point, file), 1, message)
    assert os.listdir(place.point) == []
    assert not (place.base / "x").exists()
    assert_fails(kvfuse("load", place.base, "/dev/null"), 5, "is not in a kvfuse mount")


def test_a_dump_cannot_make_anything_outside(place: Place) -> None:
    """By a link that it makes before."""
    place.mount()
    outside = place.base / "outside"
    outside.mkdir()
    named = {"mode": 0o755, "uid": 0, "gid": 0, "mtime": 0}
    lines = [
        {"type": "kvfuse-dump", "version": 1, "made": 0, "by": "0.1.0", "source": "test"},
        {"type": "symlink", "path": "/link", "target": str(outside), **named},
        {"type": "folder", "path": "/link/folder", **named},
        {"type": "end", "lines": 3},
    ]
    file = place.base / "dump"
    file.write_text("\n".join(map(json.dumps, lines)))
    assert_fails(kvfuse("load", place.point, file), 1, "'/link/folder' of the dump leads out of")
    assert os.listdir(outside) == []
    assert os.readlink(place.point / "link") == str(outside)


def test_what_cannot_be_made_is_named_and_the_rest_is_made(place: Place) -> None:
    """A namespace that wants more than the volume has, and a folder in it."""
    place.mount()
    lines = [
        '{"type": "kvfuse-dump", "version": 1, "made": 0, "by": "0.1.0", "source": "test"}',
        *[
            json.dumps({"type": "folder", "path": path, "mode": 0o755, "uid": 0, "gid": 0, "mtime": 0, **more})
            for path, more in (
                ("/bad", {"namespace": {"kind": "files", "capacity": "1"}}),
                ("/good", {"namespace": {"kind": "files", "capacity": str(8 << 20)}}),
                ("/absent/inner", {}),
            )
        ],
        '{"type": "end", "lines": 4}',
    ]
    file = place.base / "dump"
    file.write_text("\n".join(lines))
    done = kvfuse("load", place.point, file)
    assert done.returncode == 1
    assert "absent/inner: No such file" in done.stderr
    assert kvfuse("namespace", "show", place.point / "good").returncode == 0
