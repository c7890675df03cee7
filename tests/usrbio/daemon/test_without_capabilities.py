"""A daemon that cannot take shared memory back shows it to those alone who could end it anyway: a real mount."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator

import pytest
from mounting import PATIENCE_S, KvfuseMount, temporary_mount
from posix_calls import as_user
from ring_lab import RawClient, wait_for_rings

from kvfuse.usrbio.client import connect
from kvfuse.usrbio.protocol.wire import Request

pytestmark = pytest.mark.root

WITHOUT = """
import errno, sys
from kvfuse.volume.tier import revocable
def refuse():
    raise PermissionError(errno.EPERM, "no CAP_SYS_ADMIN")
revocable.leave_mounts = refuse
from kvfuse.cli import main
main()
"""
COMMAND = (sys.executable, "-c", WITHOUT, "mount", "--foreground")
USER = 65533
SIZE = 10_000


@pytest.fixture(scope="module")
def mount() -> Iterator[KvfuseMount]:
    words = ("allow_other", "volume.capacity=256MiB", "volume.segment_size=64MiB", "cache.tier_size=16MiB")
    with temporary_mount(words, COMMAND) as mount:
        wait_for_rings(mount)
        folder = mount.point / "folder"
        folder.mkdir()
        os.setxattr(folder, "user.kvfuse.namespace", b"kind=blocks")
        folder.chmod(0o777)
        yield mount


def found(mount: KvfuseMount) -> tuple[bool, int]:
    """(a GET was answered with a view, errno of MAP_INDEX), of the present user."""
    with connect(mount.point) as client:
        namespace, iov, ring = client.namespace("folder", create=False), client.iov(SIZE), client.ring(8)
        ring.prep_put(iov, 0, namespace, b"%d" % os.geteuid(), SIZE)
        ring.submit()
        assert ring.wait(1, PATIENCE_S)["result"] == SIZE
        ring.prep_get(iov, 0, namespace, b"%d" % os.geteuid(), SIZE, view=True)
        ring.submit()
        row = ring.wait(1, PATIENCE_S)[0]
        assert row["result"] == SIZE
        with RawClient(mount.point) as raw:
            descriptor = os.open(mount.point / "folder", os.O_PATH)
            number = raw.handle(Request.OPEN_NAMESPACE, 0o644, descriptors=[descriptor])
            os.close(descriptor)
            return bool(row["arena"]), raw.error(Request.MAP_INDEX, number, 0)


def test_others_get_copies(mount: KvfuseMount) -> None:
    assert found(mount) == (True, 0), "root"
    with as_user(USER):
        assert found(mount) == (False, errno.EOPNOTSUPP)
