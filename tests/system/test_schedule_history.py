"""The judge of histories finds what is wrong in made up ones, and nothing in those that may have happened."""

from __future__ import annotations

import errno

import pytest
from schedule_content import CELL, size_of, stream, version_of
from schedule_history import NEWS_SECONDS, PUBLISHED_SECONDS, History, Span

LATER = 10.0
"""seconds, more than publication and news take"""


def operation(do: str, begin: float, end: float, *, folder: str = "strict", **more: object) -> dict[str, object]:
    """A row of a log."""
    return {"do": do, "folder": folder, "name": "b0", "t": begin, "end": end, "error": 0, "slow": ("", 0, 0), **more}


def problems(*rows: tuple[int, dict[str, object]], broken: tuple[Span, ...] = ()) -> list[str]:
    """What is wrong with operations, each with its mount."""
    history = History(broken)
    for mount, row in rows:
        history.add(mount, row)
    return history.problems()


def test_bytes_of_a_version_are_known_from_others() -> None:
    for version in (1001, 2001, 3002):
        data = stream(version, size_of(version))
        assert version_of(data) == version
        assert isinstance(version_of(data[:-1]), str)
        assert isinstance(version_of(data[:-16] + stream(version + 1, size_of(version))[-16:]), str)
    assert version_of(stream(5001, CELL), CELL) == 5001


@pytest.mark.parametrize("folder", ["strict", "relaxed"])
def test_what_nobody_wrote_is_found_out(folder: str) -> None:
    put = (0, operation("put", 0, 1, version=1001, folder=folder))
    assert not problems(put, (1, operation("read", 20, 21, found=1001, folder=folder)))
    assert problems(put, (1, operation("read", 20, 21, found=2001, folder=folder)))
    assert problems(put, (1, operation("read", 20, 21, found="torn", folder=folder)))
    assert problems(
        (0, operation("put", 30, 31, version=1001, folder=folder)), (1, operation("read", 20, 21, found=1001))
    )


@pytest.mark.parametrize("found", [None, 1001])
def test_an_acknowledged_strict_write_is_read_by_all(found: int | None) -> None:
    rows = (0, operation("put", 0, 1, version=1001)), (1, operation("put", 2, 3, version=2001))
    assert problems(*rows, (2, operation("read", 3.1, 4, found=found)))
    assert not problems(*rows, (2, operation("read", 2.5, 4, found=1001)))
    assert not problems(*rows, (2, operation("read", 3.1, 4, found=2001)))


def test_a_miss_through_a_ring_says_nothing_but_is_counted() -> None:
    history = History(())
    history.add(0, operation("put", 0, 1, version=1001))
    history.add(1, operation("read", LATER, LATER, ring=True))
    assert not history.problems()
    assert len(history.false_misses()) == 1


def test_a_removal_explains_that_nothing_is_there() -> None:
    rows = (0, operation("put", 0, 1, version=1001)), (1, operation("unlink", 2, 3))
    assert not problems(*rows, (2, operation("read", 4, 5, found=None)))
    assert problems(*rows, (2, operation("read", 4, 5, found=1001)))
    assert problems(*rows, (2, operation("stat", 4, 5, size=size_of(1001))))
    assert problems(*rows, (2, operation("list", 4, 5, names=["b0"])))


def test_a_write_that_failed_may_be_there_at_any_time() -> None:
    rows = (0, operation("put", 0, 1, version=1001, error=errno.EIO)), (1, operation("put", 2, 3, version=2001))
    for found in (1001, 2001):
        assert not problems(*rows, (2, operation("read", 9, 10, found=found)))
    assert problems(*rows, (2, operation("read", 9, 10, found=None)))


@pytest.mark.parametrize("ring", [False, True])
def test_a_removal_that_failed_may_have_happened_unless_it_found_nothing(ring: bool) -> None:
    put, read = (0, operation("put", 0, 1, version=1001)), (2, operation("read", 9, 10, found=None))
    for error in (errno.ETIMEDOUT, errno.EIO):
        assert not problems(put, (1, operation("unlink", 2, 3, error=error, ring=ring)), read)
    assert problems(put, (1, operation("unlink", 2, 3, error=errno.ENOENT, ring=ring)), read)


def test_a_relaxed_write_is_seen_at_home_at_once_and_elsewhere_soon() -> None:
    put = (0, operation("put", 0, 1, version=1001, folder="relaxed"))
    soon, late = (PUBLISHED_SECONDS + NEWS_SECONDS) / 2, PUBLISHED_SECONDS + NEWS_SECONDS + 2
    assert problems(put, (0, operation("read", 1.1, 1.2, found=None, folder="relaxed")))
    assert not problems(put, (1, operation("read", soon, soon, found=None, folder="relaxed")))
    assert problems(put, (1, operation("read", late, late, found=None, folder="relaxed")))


@pytest.mark.parametrize("durable", [False, True])
def test_a_relaxed_write_may_be_lost_with_its_daemon_unless_it_was_synced(durable: bool) -> None:
    killed = Span("daemon 0", 1.5, 4)
    put = (0, operation("put", 0, 1, version=1001, folder="relaxed", durable=durable))
    for mount in (0, 1):
        read = (mount, operation("read", LATER, LATER, found=None, folder="relaxed"))
        assert bool(problems(put, read, broken=(killed,))) == durable
        assert problems(put, read, broken=(Span("daemon 2", 1.5, 4),))


def test_a_mount_that_is_cut_off_may_be_as_old_as_that() -> None:
    rows = (0, operation("put", 0, 1, version=1001)), (1, operation("put", 4, 5, version=2001))
    broken = (Span("etcd", 3, 8),)
    assert not problems(*rows, (2, operation("read", 7, 7.5, found=1001)), broken=broken)
    assert problems(*rows, (2, operation("read", 7, 7.5, found=None)), broken=broken)
    assert problems(*rows, (2, operation("read", 9, 9.5, found=1001)), broken=broken)


def test_a_name_that_was_moved_takes_its_version_along() -> None:
    rows = (0, operation("put", 0, 1, version=1001)), (1, operation("move", 2, 3, to="b1"))
    assert not problems(*rows, (2, operation("read", 4, 5, found=1001) | {"name": "b1"}))
    for found in (None, "torn"):
        assert problems(*rows, (2, operation("read", 4, 5, found=found) | {"name": "b1"}))
    assert problems(*rows, (2, operation("read", 4, 5, found=1001)))


def test_a_folder_is_made_by_one() -> None:
    rows = [(mount, operation("mkdir", mount, mount + 0.5, version=mount) | {"name": "d0"}) for mount in range(2)]
    assert problems(*rows)
    assert not problems(rows[0], (1, {**rows[1][1], "error": errno.EEXIST}))


def test_every_cell_is_as_it_was_written() -> None:
    change = (0, operation("change", 0, 1, places={"3": 1001}) | {"name": "few"})
    append = (0, operation("append", 0, 1, versions=[2001, 3001], size=CELL) | {"name": "log"})

    def reads(name: str, *cells: object) -> tuple[int, dict[str, object]]:
        return 1, operation("cells", 2, 3, cells=list(cells)) | {"name": name}

    assert not problems(change, reads("few", None, None, None, 1001))
    assert problems(change, reads("few", None, None, None, None))
    assert problems(change, reads("few", None, None, 1001, 1001))
    assert not problems(append, reads("log", None, 2001, 3001))
    assert problems(append, reads("log", None, 2001))
    assert problems(append, reads("log", None, 3001, 2001))
