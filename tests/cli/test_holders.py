"""Asking the holder of a mount, where something else listens at its socket."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvfuse.cli import holders
from kvfuse.errors import MountError
from kvfuse.mounttable import FILE_SYSTEM, Mounted, parse_mountinfo

SOMEBODY = 1234


def mounted_by(user: int) -> Mounted:
    return Mounted(Path("/mnt/kv"), FILE_SYSTEM, "/srv/kv", "0:4242", False, user)


@contextmanager
def listening(path: Path, answer: bytes, uid: int = 0) -> Iterator[None]:
    """A process of this user at this path, which answers so once."""

    def serve() -> None:
        stream, _ = listener.accept()
        with stream:
            if stream.recv(1 << 16):
                stream.send(answer)

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(os.fspath(path))
        os.seteuid(uid)
        try:
            listener.listen()  # whose process that is the kernel says of this moment
        finally:
            os.seteuid(0)
        thread = threading.Thread(target=serve)
        thread.start()
        yield
        thread.join()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "holder.sock"
    monkeypatch.setattr(holders, "_paths", lambda row: [os.fspath(path)])
    return path


@pytest.mark.root
@pytest.mark.parametrize(("uid", "user", "is_asked"), [(0, 0, True), (SOMEBODY, SOMEBODY, True), (SOMEBODY, 0, False)])
def test_only_root_or_who_mounted_is_the_holder(place: Path, uid: int, user: int, is_asked: bool) -> None:
    with listening(place, json.dumps({"holder": 1}).encode(), uid):
        if is_asked:
            assert holders.ask(mounted_by(user), 5.0, do="status") == {"holder": 1}
        else:
            with pytest.raises(MountError, match="no process that keeps it"):
                holders.ask(mounted_by(user), 5.0, do="status")


@pytest.mark.parametrize("answer", [b"[1]", b"7", b"no JSON", b"[" * 60_000, b"{}"])
def test_an_answer_that_makes_no_sense_is_none(place: Path, answer: bytes) -> None:
    with listening(place, answer, os.geteuid()), pytest.raises(MountError, match="has ended meanwhile"):
        holders.ask(mounted_by(os.geteuid()), 5.0, do="status")


def test_the_table_says_who_mounted() -> None:
    rows = parse_mountinfo(
        "90 28 0:52 / /mnt/kv rw,nosuid shared:1 - fuse.kvfuse /srv/kv rw,user_id=1234,group_id=5,allow_other\n"
        "91 28 0:53 / /mnt/other rw - ext4 /dev/sda rw\n"
    )
    assert [row.user for row in rows] == [1234, None]


def test_names_of_mounts_are_any_bytes() -> None:
    """Among them what Python takes for ends of lines: a row is one row."""
    name = b"/mnt/\xff\r\x0b\x1c\xc3\x85\x85"
    rows = b"90 28 0:52 / %b rw - fuse.kvfuse /srv/kv rw,user_id=0\n" % name
    (row,) = parse_mountinfo(rows.decode("latin-1"))
    assert os.fsencode(row.point) == name
