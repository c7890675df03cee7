"""`kvfuse profile`: who calls what by files, rings and shared memory, how many bytes, and how long it takes."""

from __future__ import annotations

import json
import os
import pty
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_lab import Place, assert_fails, kvfuse
from mounting import KVFUSE, wait_until
from places import ROOT

from kvfuse.cli.profile import quantile, rates_between
from kvfuse.usrbio.client import BlockStore

KIB = 1 << 10
Rows = dict[tuple[int, str, str], dict[str, Any]]


def look(point: Path) -> Rows:
    """What the daemon says: each look keeps the profile going."""
    found = json.loads((point / ".kvfuse" / "profile").read_bytes())["profile"]
    return {(row["pid"], row["namespace"], row["operation"]): row for row in found["rows"]}


def until(point: Path, is_there: Callable[[Rows], object]) -> Rows:
    found: list[Rows] = []

    def looks() -> bool:
        found[:] = [look(point)]
        return bool(is_there(found[0]))

    wait_until(looks, "the profile to show it")
    return found[0]


@pytest.fixture
def point(place: Place) -> Iterator[Path]:
    place.mount()
    assert kvfuse("namespace", "create", place.point / "files", "--kind", "files").returncode == 0
    assert kvfuse("namespace", "create", place.point / "blocks").returncode == 0
    yield place.point
    place.end_sound()


def test_files_are_counted_by_process_and_namespace(point: Path) -> None:
    look(point)
    pid = os.getpid()
    (point / "files" / "one").write_bytes(bytes(100 * KIB))
    (point / "two").write_bytes(bytes(10 * KIB))
    (point / "blocks" / "three").write_bytes(bytes(64 * KIB))  # in C
    with pytest.raises(FileNotFoundError):
        (point / "files" / "absent").rmdir()
    subprocess.run(["cat", point / "files" / "one"], stdout=subprocess.DEVNULL, check=True)
    rows = until(point, lambda rows: (pid, "/blocks", "write") in rows)
    assert rows[pid, "/files", "write"]["bytes"] == 100 * KIB
    assert rows[pid, "/", "write"]["bytes"] == 10 * KIB
    assert rows[pid, "/blocks", "write"]["bytes"] == 64 * KIB
    assert rows[pid, "/files", "create"]["calls"] == 1
    assert sum(rows[pid, "/files", "write"]["times"]) == rows[pid, "/files", "write"]["calls"]
    others = [key for key in rows if key[1:] == ("/files", "open") and key[0] != pid]
    assert len(others) == 1  # cat


def test_rings_and_blocks_in_place_are_counted(point: Path) -> None:
    look(point)
    pid = os.getpid()
    with BlockStore(point, "blocks", create=False) as store:
        store.put_many([b"key %d" % number for number in range(20)], [bytes(4 * KIB)] * 20)
        store.put(b"lone", bytes(KIB))
        assert store.get(b"absent") is None
        assert store.exists([b"lone", b"absent"]).tolist() == [True, False]
        store.delete(b"key 1")
        ring = store.client.ring()
        file = store.client.file(point / "files" / "file", "rw")
        iov = store.client.iov(8 * KIB)
        ring.prep_write(iov, 0, file, 0, 8 * KIB)
        ring.submit()
        ring.wait(1)
        buffer = bytearray(4 * KIB)
        for number in range(2, 20):
            assert store.get_into(b"key %d" % number, buffer) == 4 * KIB
        rows = until(point, lambda rows: (pid, "/blocks", "get in place") in rows)
        puts, write = rows[pid, "/blocks", "ring put"], rows[pid, "/files", "ring write"]
        assert (puts["calls"], puts["bytes"], puts["failed"]) == (21, 81 * KIB, 0)
        assert sum(puts["times"]) == 21
        assert (write["calls"], write["bytes"]) == (1, 8 * KIB)
        assert rows[pid, "/blocks", "ring delete"]["calls"] == 1
        in_place = rows[pid, "/blocks", "get in place"]
        assert 1 <= in_place["calls"] <= 19
        assert in_place["bytes"] % (4 * KIB) == 0
        assert sum(in_place["times"]) == 0


def test_it_prints_rates_once_and_as_json(point: Path) -> None:
    process = subprocess.Popen(["sh", "-c", f"while :; do echo x > {point}/files/file; done"], stdin=subprocess.DEVNULL)
    try:
        done = kvfuse("profile", point, "--seconds", "1", "--json")
        assert done.returncode == 0, done.stderr
        (row,) = [row for row in json.loads(done.stdout) if row["pid"] == process.pid and row["operation"] == "write"]
        assert row["namespace"] == "/files"
        assert row["bytes_per_second"] == pytest.approx(2 * row["calls_per_second"])
        assert 0 < row["p50_seconds"] <= row["p99_seconds"]
        done = kvfuse("profile", point, "--seconds", "1", COLUMNS="80")
        (line,) = [line for line in done.stdout.splitlines() if f"{process.pid} sh" in line and " write " in line]
        assert len(line.rstrip()) <= 80
    finally:
        process.kill()
        process.wait()


def test_q_ends_the_live_page(point: Path) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*KVFUSE, "profile", point],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    os.close(theirs)
    said = b""
    while b"calls/s" not in said:
        said += os.read(ours, 4096)
    os.write(ours, b"xq")

    def has_ended() -> bool:
        nonlocal said
        try:
            said += os.read(ours, 65536)  # it would wait for the terminal to take what it prints
        except OSError:  # nobody has it open any more
            pass
        return process.poll() is not None

    wait_until(has_ended, "the end")
    os.close(ours)
    assert process.returncode == 0, said


def test_it_ends_when_nobody_looks_and_begins_anew(point: Path) -> None:
    def seconds() -> float:
        found = json.loads((point / ".kvfuse" / "profile").read_bytes())["profile"]["seconds"]
        assert isinstance(found, float)
        return found

    assert seconds() < 1
    before = seconds()
    assert seconds() > before
    done = kvfuse("profile", point, "--seconds", "0.5", "--json")
    assert done.returncode == 0, done.stderr
    stats = json.loads((point / ".kvfuse" / "stats").read_bytes())
    assert "profile" not in stats


def test_what_cannot_be_is_refused(point: Path) -> None:
    assert_fails(kvfuse("profile", point.parent), 5, "is not a mount point")
    assert kvfuse("profile", point, "--interval", "10").returncode == 2


def test_rates_are_of_the_time_between_two_looks() -> None:
    def looked(seconds: float, calls: int, times: list[int]) -> dict[str, Any]:
        row = {
            "pid": 1,
            "command": "c",
            "namespace": "/",
            "operation": "read",
            "calls": calls,
            "misses": 0,
            "failed": 0,
        }
        return {"seconds": seconds, "rows": [{**row, "bytes": 10 * calls, "seconds": 1.0, "times": times}]}

    (rate,) = rates_between(looked(10, 100, [0, 100, 0]), looked(12, 300, [0, 100, 200]))
    assert (rate.calls_per_second, rate.bytes_per_second) == (100, 1000)
    assert rate.p50_seconds == pytest.approx(2.5e-9)
    assert rates_between(looked(10, 100, [0, 100]), looked(12, 100, [0, 100])) == []
    (rate,) = rates_between(looked(10, 100, [0, 100]), looked(2, 6, [0, 6]))  # another daemon
    assert rate.calls_per_second == 3
    assert quantile([0, 0], 0.5) is None
    assert quantile([1, 0, 1], 0.99) == pytest.approx(2.98e-9)
