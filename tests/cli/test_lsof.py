"""`kvfuse lsof`: who has what of a mount open, as /proc and the daemon say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from cli_lab import Place, assert_fails, kvfuse
from places import ROOT

from kvfuse.usrbio.client import BlockStore

HOLDER = """
import mmap, os, sys
file = open(sys.argv[1], "r+b")
mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
os.chdir(sys.argv[2])
print(file.fileno(), flush=True)
sys.stdin.read()
"""


def used(*words: str | Path) -> list[dict[str, Any]]:
    done = kvfuse("lsof", *words, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert isinstance(found, list)
    return found


@pytest.fixture
def mounted(place: Place) -> Iterator[Place]:
    place.mount()
    (place.point / "folder").mkdir()
    (place.point / "file").write_bytes(b"bytes")
    yield place
    place.end_sound()


@pytest.fixture
def held(mounted: Place) -> Iterator[tuple[int, int]]:
    """(pid, descriptor) of a process that has a file open and mapped, and works in a folder."""
    with ExitStack() as stack:
        yield hold(stack, [], mounted.point / "file", mounted.point / "folder")


def hold(stack: ExitStack, words: list[str], file: Path, folder: Path) -> tuple[int, int]:
    process = stack.enter_context(
        subprocess.Popen(
            [*words, sys.executable, "-c", HOLDER, file, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
    )
    stack.callback(process.stdin.close)  # type: ignore[union-attr]
    assert process.stdout is not None
    return process.pid, int(process.stdout.readline())


def test_files_maps_and_folders_of_processes_are_listed(mounted: Place, held: tuple[int, int]) -> None:
    pid, descriptor = held
    rows = [row for row in used(mounted.point) if row["pid"] == pid]
    file, folder = str(mounted.point / "file"), str(mounted.point / "folder")
    found = {(row["what"], row["name"]) for row in rows}
    assert {("cwd", folder), (f"fd {descriptor} rw", file)} <= found
    assert any(what.startswith("map r") and name == file for what, name in found)
    assert {row["mountpoint"] for row in rows} == {str(mounted.point)}
    assert rows[0]["command"].startswith("python")
    done = kvfuse("lsof", mounted.point, COLUMNS="80")
    (line,) = [line for line in done.stdout.splitlines() if f" fd {descriptor} rw " in line]
    assert line.split()[0] == str(pid)
    assert line.rstrip().endswith(" /file")


def test_rings_memory_and_views_of_clients_are_listed(mounted: Place) -> None:
    with BlockStore(mounted.point, "blocks") as store:
        store.put(b"key", b"block" * 1000)
        store.client.iov(1 << 20)
        with store.client.file(mounted.point / "file", "r"), store.view(b"key") as view:
            assert view is not None
            rows = {row["what"]: row for row in used(mounted.point) if not row["what"].startswith(("fd", "map"))}
            assert {"rings", "memory", "ns", "file"} <= rows.keys()
            assert {row["pid"] for row in rows.values()} == {os.getpid()}
            assert rows["ns"]["name"] == "/blocks"
            assert rows["file"]["name"] == "/file"
            assert rows["memory"]["size"] >= 1 << 20
            assert rows["rings"]["size"] > 0
    assert not [row for row in used(mounted.point) if row["pid"] == os.getpid()]


def test_nobody_and_what_is_no_mount(mounted: Place) -> None:
    done = kvfuse("lsof", mounted.point)
    assert (done.returncode, done.stdout) == (0, "")
    assert f"nobody has anything open of {mounted.point}" in done.stderr
    assert_fails(kvfuse("lsof", mounted.base), 5, "is not a mount point")


@pytest.mark.root
def test_a_process_in_a_container_is_found_by_its_own_path(mounted: Place) -> None:
    """A mount namespace of its own, in which a folder of the mount is elsewhere."""
    inside = mounted.base / "inside"
    inside.mkdir()
    (mounted.point / "folder" / "file").write_bytes(b"bytes")
    script = f'mount --bind {mounted.point}/folder {inside} && umount -l {mounted.point} && exec "$@"'
    words = ["unshare", "-m", "--propagation", "private", "sh", "-c", script, "sh"]
    with ExitStack() as stack:
        hold(stack, words, inside / "file", inside)
        names = {(row["what"].split()[0], row["name"]) for row in used(mounted.point)}
        assert {("fd", str(inside / "file")), ("cwd", str(inside)), ("map", str(inside / "file"))} <= names


@pytest.mark.root
def test_other_users_see_their_own_clients_alone(mounted: Place) -> None:
    with BlockStore(mounted.point, "blocks"):
        (row,) = json.loads((mounted.point / ".kvfuse" / "clients").read_bytes())["clients"]
        assert row["uid"] == 0
        script = f"print(open('{mounted.point}/.kvfuse/clients').read())"
        done = subprocess.run(
            ["setpriv", "--reuid=12345", "--clear-groups", sys.executable, "-c", script],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            check=False,
        )
        if done.returncode == 0:  # the mount lets others in
            assert json.loads(done.stdout)["clients"] == []
        else:
            assert "Permission denied" in done.stderr
