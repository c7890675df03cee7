"""A reader on a real mount does not wait until a flood of its own user in another namespace has been served."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest
from mounting import KvfuseMount, temporary_mount

from kvfuse.usrbio.client import connect

pytestmark = pytest.mark.ring(3)

SIZE = 16 << 10
PUTS = 400
GETS = 20
ATTEMPTS = 3


@pytest.fixture
def mount() -> Iterator[KvfuseMount]:
    with temporary_mount(["volume.capacity=256MiB"]) as mount:
        yield mount


def test_gets_that_need_the_event_loop_overtake_puts_of_another_namespace(mount: KvfuseMount) -> None:
    """How many of the puts that were submitted before are done when all gets are: in the best of some attempts,
    as this process may be the one that is late."""
    for name in ("flooded", "read"):
        (mount.point / name).mkdir()
        os.setxattr(mount.point / name, "user.kvfuse.namespace", b"kind=files")
    keys = [b"%d" % number for number in range(GETS * ATTEMPTS)]
    for key in keys:
        (mount.point / "read" / key.decode()).write_bytes(bytes(SIZE))
    done = []
    with (
        connect(mount.point) as client,
        client.iov((PUTS + GETS) * SIZE) as iov,
        client.ring(512) as flood,
        client.ring(64) as reader,
    ):
        flooded, read = client.namespace(mount.point / "flooded"), client.namespace(mount.point / "read")
        for attempt in range(ATTEMPTS):
            names = [b"%d-%d" % (attempt, number) for number in range(PUTS)]
            flood.prep_puts([iov] * PUTS, np.arange(PUTS) * SIZE, flooded, names, SIZE)
            flood.submit()
            for number, key in enumerate(keys[attempt * GETS : (attempt + 1) * GETS]):  # each is the first of its block
                reader.prep_get(iov, (PUTS + number) * SIZE, read, key, SIZE)
            reader.submit()
            results = reader.wait(GETS)["result"]
            finished = flood.wait(PUTS, timeout=0)
            assert results.tolist() == [SIZE] * GETS
            done.append(len(finished))
            rest = flood.wait(PUTS - len(finished)) if len(finished) < PUTS else finished[:0]
            assert (np.concatenate([finished["result"], rest["result"]]) == SIZE).all()
    assert min(done) < PUTS // 2, f"of {PUTS} puts so many were done before {GETS} gets: {done}"
