"""kvfuse top and status at a terminal of 80 by 24 and smaller: nothing breaks there, q ends, other bytes do nothing."""

from __future__ import annotations

import os
import random
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_lab import kvfuse
from mounting import KvfuseMount, temporary_mount
from terminal import Terminal, at_terminal

from kvfuse.cli.console import fill_lines, shorten
from kvfuse.cli.keyboard import KeyParser
from kvfuse.usrbio.client import BlockStore

MODEL = "llama-3-70b-instruct-fp8-tensor-parallel-8"
SHARP = {"read/s", "write/s", "req/s", "hits", "p99", "use", "namespace"}
ARROWS = b"\x1b[A\x1b[B\x1bOC\x1b[1;5D"


@pytest.fixture(scope="module")
def mount() -> Iterator[KvfuseMount]:
    """With 30 namespaces of long names, one of them busy."""
    with temporary_mount(["capacity=256MiB,kind=blocks,admission=all"]) as mount:
        for number in range(30):
            folder = mount.point / f"{MODEL}-{number}"
            folder.mkdir()
            os.setxattr(folder, "user.kvfuse.namespace", b"kind=blocks")
        with BlockStore(mount.point, f"{MODEL}-17") as store:
            for size in (4096, 65536, 200_000):
                for number in range(100):
                    store.put(f"{size}-{number}", bytes(size))
            assert store.get("4096-1") is not None
        yield mount


def row_of(terminal: Terminal, tail: str) -> str:
    (row,) = [line for line in terminal.lines if line.split() and line.split()[0].endswith(tail)]
    return row


def test_top_fits_a_terminal_of_80_by_24(mount: KvfuseMount) -> None:
    with at_terminal("top", mount.point, "--interval", "30") as terminal:
        terminal.wait_for("slabs of")
        terminal.drain()
        print(*terminal.lines, sep="\n")
        head = next(line.split() for line in terminal.lines if "namespace" in line)
        assert set(head) == SHARP
        rows = [line for line in terminal.lines if re.match(r" ?/(llama|$| )", line)]
        assert 8 <= len(rows) < 30
        assert all(re.search(r" \d+%$", row) for row in rows), "a row a namespace"
        assert row_of(terminal, "8-17") in rows
        assert terminal.has(f"and {31 - len(rows)} other namespaces")
        assert terminal.lines[0].startswith(f"{mount.point}  up ")
        assert all(not line or re.match(r"[/ \w─]", line) for line in terminal.lines), "each line begins with a word"
        terminal.press(b"q")
        assert terminal.wait_end() == 0
        assert terminal.modes_now == terminal.modes


@pytest.mark.parametrize(("columns", "lines"), [(80, 24), (40, 10), (20, 5), (200, 60)])
def test_q_ends_top(mount: KvfuseMount, columns: int, lines: int) -> None:
    with at_terminal("top", mount.point, "--interval", "30", columns=columns, lines=lines) as terminal:
        terminal.wait_for("slabs" if lines > 10 else "up ")
        terminal.press(b"q")
        assert terminal.wait_end() == 0
        assert terminal.modes_now == terminal.modes


def test_ctrl_c_ends_top_and_other_bytes_do_not(mount: KvfuseMount, seed: int) -> None:
    rng = random.Random(seed)
    harmless = [
        byte for byte in range(256) if byte not in b"qQ\x03\x1c\x1a\x13\x11\x0f\x16"
    ]  # those of signals and flow
    with at_terminal("top", mount.point, "--interval", "0.1") as terminal:
        terminal.wait_for("slabs of")
        for _ in range(20):
            terminal.press(ARROWS + bytes(rng.choices(harmless, k=50)) + b"\x1b[0m")
            terminal.wait_change()
        assert terminal.has("namespace")
        assert terminal.has("slabs of")
        terminal.press(b"\x03")
        assert terminal.wait_end() == 0
        assert terminal.modes_now == terminal.modes


def test_stats_ends_by_q_too(mount: KvfuseMount) -> None:
    with at_terminal("stats", mount.point, "--watch", "--interval", "30") as terminal:
        terminal.wait_for("per second")
        terminal.press(b"q")
        assert terminal.wait_end() == 0


def test_top_goes_on_where_nobody_types(mount: KvfuseMount, tmp_path: Path) -> None:
    """stdin is no terminal, or is one that is gone."""
    done = kvfuse("top", mount.point, "--once")
    assert done.returncode == 0
    assert f"/{MODEL}-29" in done.stdout
    assert "other namespaces" not in done.stdout


def test_status_fits_80_columns(mount: KvfuseMount) -> None:
    with at_terminal("status", mount.point) as terminal:
        assert terminal.wait_end() == 0
        shown = {line.split()[0]: " ".join(line.split()[1:]) for line in terminal.lines if line.startswith("  ")}
        assert shown["source"] == str(mount.volume)
        assert shown["mode"] == "rw"
        assert shown["pid"] == str(mount.pid)
        assert re.fullmatch(r"\S+iB \(\d+%\)", shown["used"])
        assert re.fullmatch(r"ok, answers in \S+ ms", shown["health"])
        assert terminal.lines[0] == str(mount.point)
    with at_terminal("status", mount.point, columns=200) as terminal:
        assert terminal.wait_end() == 0
        assert any(line.split()[:3] == ["mount", "point", "source"] for line in terminal.lines)


def test_status_of_a_long_problem_breaks_between_words() -> None:
    with temporary_mount(["capacity=64MiB"]) as mount:
        os.kill(mount.pid, signal.SIGKILL)
        mount.wait(-9)
        with at_terminal("status", mount.point) as terminal:
            assert terminal.wait_end() == 1
            text = " ".join(" ".join(terminal.lines).split())
            assert f"dead: its daemon is gone; type: kvfuse umount {mount.point}" in text
        assert kvfuse("umount", "--lazy", mount.point).returncode == 0


# -- the parts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [b"q", b"Q", b"abcq", b"\x1b[Aq", b"\xff\x80q", b"\x1b\x1b[Bq"])
def test_a_q_is_found_among_sequences(data: bytes) -> None:
    assert KeyParser().has_quit(data)
    parser = KeyParser()
    assert [parser.has_quit(bytes([byte])) for byte in data][-1], "in pieces"


@pytest.mark.parametrize("data", [b"\x1bOq", b"\x1b[12q", b"\x1bq", b"\x1b[", b"", b"x\xc3\xa9"])
def test_a_q_within_a_sequence_is_none(data: bytes) -> None:
    assert not KeyParser().has_quit(data)
    parser = KeyParser()
    assert not any(parser.has_quit(bytes([byte])) for byte in data), "in pieces"


def test_names_are_shortened_in_the_middle() -> None:
    assert shorten("/a/b", 4) == "/a/b"
    assert shorten("/llama-3-70b-17", 9) == "/lla…b-17"
    for width in range(1, 30):
        assert len(shorten(MODEL, width)) == width


def test_lines_are_filled_with_whole_pieces() -> None:
    assert fill_lines(["aa", "bb", "cccc"], 6) == ["aa  bb", "cccc"]
    assert fill_lines(["longer than that", "b"], 6) == ["longer than that", "b"]
