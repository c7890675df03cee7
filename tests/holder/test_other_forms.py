"""What a daemon of another version left in a form of its own is dropped, and never misread; and so is ours by that one.

Each case changes a form's number in the version that a mount is upgraded to, and then goes back.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import pytest
from mounting import KvfuseMount, temporary_mount
from test_outlive import OUTLIVE
from upgrading import other_python, upgrade

from kvfuse.errors import Disconnected
from kvfuse.kept.keeper import MemoryKeeper
from kvfuse.usrbio.client import BlockStore
from kvfuse.usrbio.daemon.connection_keeping import FORM, ConnectionOwner
from kvfuse.usrbio.protocol.wire import VERSION
from kvfuse.volume.store.member import Standing

DATA = os.urandom(50_000)
KEY = b"key"


class User:
    """Has a file open, and a client of rings, from before an upgrade on."""

    def __init__(self, mount: KvfuseMount) -> None:
        self._mount = mount
        self._file = os.open(mount.point / "file", os.O_RDONLY)
        self._store = BlockStore(mount.point, "blocks")
        assert self._ring() == "goes on"

    def fates(self) -> dict[str, str]:
        """Of the open file, of the client and of the blocks in memory: since the last upgrade."""
        adopted = json.loads((self._mount.point / ".kvfuse" / "stats").read_text())["tier"]["adopted"]
        return {"file": self._read(), "ring": self._ring(), "blocks": "goes on" if adopted else "is dropped"}

    def _read(self) -> str:
        os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)
        try:
            assert os.pread(self._file, len(DATA), 0) == DATA
        except OSError as error:
            assert error.errno == errno.EBADF
            return "is dropped"
        return "goes on"

    def _ring(self) -> str:
        buffer = bytearray(len(DATA) + 4096)
        try:
            assert self._store.get_into(KEY, buffer) == len(DATA)
        except Disconnected:
            return "is dropped"
        assert buffer[: len(DATA)] == DATA
        return "goes on"

    def close(self) -> None:
        os.close(self._file)
        with suppress(Disconnected):
            self._store.close()


@contextmanager
def user_of(mount: KvfuseMount) -> Iterator[User]:
    user = User(mount)
    try:
        yield user
    finally:
        user.close()


CASES = [
    (
        [
            "import kvfuse.fs.handles, kvfuse.fs.door_handover, kvfuse.fs.idempotent_changes",
            "import kvfuse.volume.tier.arena_rows",
            "kvfuse.fs.handles.FORM = kvfuse.fs.door_handover.UNSAVED_FORM = kvfuse.fs.idempotent_changes.FORM = 99",
            "kvfuse.volume.tier.arena_rows.MAGIC = 99",
        ],
        {"file": "is dropped", "ring": "goes on", "blocks": "is dropped"},
    ),
    (
        [
            "import kvfuse.usrbio.daemon.connection_keeping, kvfuse.volume.tier.arena_pool",
            "kvfuse.usrbio.daemon.connection_keeping.FORM = kvfuse.volume.tier.arena_pool._FORM = 99",
        ],
        {"file": "goes on", "ring": "is dropped", "blocks": "is dropped"},
    ),
]


def test_what_has_another_form_is_dropped(tmp_path: Path) -> None:
    """Also what has a name that nobody knows: else the version that knows it would find it again, after this one has
    changed everything."""
    found = tmp_path / "found"
    unknown = [
        "import kvfuse.kept.keeper as k",
        "k.KNOWN += ('volume/log',)",
        "import kvfuse.fs.mount_session as m",
        f"def drop(keeper, former=m.drop_unknown): former(keeper); open({str(found)!r}, 'a').write("
        "f\"{keeper.take('volume/log')} \"); keeper.keep('volume/log', b'content')",
        "m.drop_unknown = drop",
    ]
    with temporary_mount(OUTLIVE) as mount:
        (mount.point / "file").write_bytes(DATA)
        with BlockStore(mount.point, "blocks") as store:
            store.put(KEY, DATA)
        for lines, expected in CASES:
            with other_python(tmp_path, [*lines, *unknown]) as python:
                for words in (("--python", python), ()):
                    with user_of(mount) as user:
                        upgrade(mount, *words)
                        assert user.fates() == expected, (lines, words)
        mount.check_unexpected_errors()
        assert found.read_text() == "None None "
        assert "volume/log, which another version kept, is dropped" in mount.log.read_text()


def test_a_client_of_another_protocol_of_rings_is_dropped() -> None:
    known = ConnectionOwner(1, 0, 0, [], 0, True, [], [])
    assert known.to_process().pid == 1
    for changes in ({"protocol": VERSION + 1}, {"form": FORM + 1}):
        with pytest.raises(ValueError, match="another version"):
            msgspec.structs.replace(known, **changes).to_process()


def test_a_client_of_a_shared_volume_of_another_form_is_dropped() -> None:
    keeper = MemoryKeeper()
    standing = Standing(1, b"lease", (2, 3))
    standing.keep(keeper)
    assert Standing.take(keeper) == standing
    msgspec.structs.replace(standing, form=99).keep(keeper)
    assert Standing.take(keeper) is None
    keeper.keep("member", msgspec.msgpack.encode((1, b"lease", (2, 3))))
    assert Standing.take(keeper) == standing, "as it was kept before it had a form"
