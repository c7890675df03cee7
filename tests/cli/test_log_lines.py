"""The daemon's log as text, as JSON and in systemd's journal; and lines of one request have its number."""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import subprocess
from collections import Counter
from contextvars import copy_context
from pathlib import Path

import pytest
import trio
from cli_lab import Place, assert_fails, kvfuse
from mounting import FOREGROUND, KVFUSE, temporary_mount, wait_until
from ring_calls import done

from kvfuse import serving
from kvfuse.cli.logs import TEXT, JournalHandler, JsonFormatter, PriorityFormatter, note_request
from kvfuse.usrbio.client import connect

KEYS = {"time", "level", "logger", "message", "pid", "mount"}
LOGGING = """
import kvfuse.cli, logging
from kvfuse.volume.operations import Tree
from kvfuse.usrbio.daemon.loop_calls import Calls

log = logging.getLogger("planted")

def telling(kind, name):
    inner = getattr(kind, name)
    async def tell(*arguments, **keywords):
        log.warning("begins %s", name)
        try:
            return await inner(*arguments, **keywords)
        finally:
            log.warning("ends %s", name)
    setattr(kind, name, tell)

telling(Tree, "make_directory")
telling(Calls, "_do_call")
kvfuse.cli.main()
"""


def record_of(message: str, level: int = logging.WARNING, error: bool = False) -> logging.LogRecord:
    try:
        raise ValueError("planted")
    except ValueError as caught:
        info = (type(caught), caught, caught.__traceback__) if error else None
    record = logging.LogRecord("kvfuse.part", level, "", 0, message, None, info)
    note_request(record)
    return record


def test_json_is_one_line_whatever_is_said() -> None:
    formatter = JsonFormatter("/mnt/kv")
    text = formatter.format(record_of('two\nlines "and" \x1b]0;owned\x07 \udcff', error=True))
    assert text.isprintable()
    found = json.loads(text)
    assert found.keys() == KEYS | {"exception"}
    assert found["message"] == 'two\nlines "and" \x1b]0;owned\x07 \udcff'
    assert found["exception"].endswith("ValueError: planted")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", found["time"])
    assert (found["level"], found["mount"], found["pid"]) == ("warning", "/mnt/kv", os.getpid())


async def test_a_request_and_all_that_it_begins_have_one_number() -> None:
    said: dict[str, str | None] = {}

    def note(name: str) -> None:
        said[name] = serving.described()

    async def request(kind: str) -> None:
        serving.SERVED.set((kind, next(serving.NUMBERS)))
        note(kind)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(inner, kind)
            await trio.to_thread.run_sync(note, f"{kind} thread")
        note(f"{kind} end")

    async def inner(kind: str) -> None:
        note(f"{kind} task")

    async with trio.open_nursery() as nursery:
        for kind in ("read", "write"):
            nursery.start_soon(request, kind)
    note("beside")
    assert said["beside"] is None
    for kind in ("read", "write"):
        numbers = {said[name] for name in (kind, f"{kind} thread", f"{kind} task", f"{kind} end")}
        assert len(numbers) == 1
        assert re.fullmatch(rf"{kind} \d+", numbers.pop() or "")
    assert said["read"] != said["write"]


def test_text_has_the_number_at_the_end() -> None:
    formatter = logging.Formatter(TEXT)
    assert formatter.format(record_of("plain")).endswith("kvfuse.part: plain")

    def within() -> str:
        serving.SERVED.set(("write", next(serving.NUMBERS)))
        return formatter.format(record_of("late"))

    assert re.search(r"kvfuse.part: late \[write \d+\]$", copy_context().run(within))


def test_priorities_stand_before_each_line() -> None:
    lines = PriorityFormatter("%(message)s").format(record_of("failed", logging.ERROR, error=True)).split("\n")
    assert len(lines) > 3
    assert all(line.startswith("<3>") for line in lines)
    assert PriorityFormatter("%(message)s").format(record_of("well", logging.INFO)) == "<6>well"


def parse_journal(data: bytes) -> dict[str, str]:
    """A datagram of systemd's native protocol."""
    found = {}
    while data:
        line, _, data = data.partition(b"\n")
        name, is_short, value = line.partition(b"=")
        if not is_short:
            size = int.from_bytes(data[:8], "little")
            value, data = data[8 : 8 + size], data[9 + size :]
        found[name.decode()] = value.decode()
    return found


def test_the_journal_gets_fields(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as journal:
        journal.bind(str(tmp_path / "socket"))
        handler = JournalHandler(tmp_path / "socket", "/mnt/kv")
        handler.emit(record_of("one line"))
        handler.emit(record_of("two\nlines=x", logging.ERROR))
        handler.emit(record_of("x" * 1_000_000))
        first = parse_journal(journal.recv(1 << 20))
        second = parse_journal(journal.recv(1 << 20))
    assert first == {
        "MESSAGE": "one line", "PRIORITY": "4", "SYSLOG_IDENTIFIER": "kvfuse", "KVFUSE_MOUNT": "/mnt/kv"
    }  # fmt: skip
    assert (second["MESSAGE"], second["PRIORITY"]) == ("two\nlines=x", "3")
    (tmp_path / "socket").unlink()
    handler.emit(record_of("nobody listens"))
    handler.close()


def test_a_mount_without_a_journal_says_so(place: Place) -> None:
    if Path("/run/systemd/journal/socket").is_socket():
        pytest.skip("this machine has a journal")
    assert kvfuse("format", place.volume, "--capacity", "64MiB").returncode == 0
    refused = kvfuse("mount", place.volume, place.point, "-o", "log.journal=true")
    assert_fails(refused, 2, "log.journal: this machine has no journal")


def test_a_daemon_of_a_unit_marks_its_lines(place: Place, tmp_path: Path) -> None:
    """With stderr as systemd gives it: JOURNAL_STREAM names it."""
    with (tmp_path / "journal").open("wb") as journal:
        figures = os.fstat(journal.fileno())
        environment = {**os.environ, "JOURNAL_STREAM": f"{figures.st_dev}:{figures.st_ino}"}
        words = ["mount", "--foreground", place.volume, place.point, "-o", "capacity=64MiB,outlive=false"]
        daemon = subprocess.Popen([*KVFUSE, *words], stderr=journal, env=environment)
        try:
            wait_until(lambda: place.is_mounted and b"mounted on" in (tmp_path / "journal").read_bytes(), "the mount")
        finally:
            daemon.terminate()
            assert daemon.wait() == 0
    lines = (tmp_path / "journal").read_text().splitlines()
    assert any(re.match(r"<6>kvfuse\.cli\.daemon: .* is mounted on", line) for line in lines)


def test_a_mount_logs_json_with_requests(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = (FOREGROUND[0], "-c", LOGGING, "mount", "--foreground")
    with temporary_mount(["capacity=64MiB", f"log.format=json,log.file={log}"], command) as mount:
        for number in range(20):
            (mount.point / f"folder{number}").mkdir()
        (mount.point / "file").write_bytes(bytes(4096))
        with connect(mount.point) as client, client.ring(8) as ring, client.file(mount.point / "file", "rw") as file:
            ring.prep_fsync(file)
            done(ring)
        point = str(mount.point)
        pid = mount.pid
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert all(row.keys() >= KEYS and row["mount"] == point and row["pid"] == pid for row in rows)
    planted = [row for row in rows if row["logger"] == "planted"]
    numbers = Counter(row["request"] for row in planted)
    assert len(numbers) == len(planted) // 2 >= 20
    assert set(numbers.values()) == {2}, "both lines of a request, and of no other one"
    assert {request.rpartition(" ")[0] for request in numbers} >= {"mkdir", "ring fsync"}
    assert all("request" not in row for row in rows if "is mounted on" in row["message"])
