"""``kvfuse bench door``: its table, and the file system in C that is its reference."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfuse.errors import MountError
from kvfuse_bench import measures
from kvfuse_bench.daemons import compile_passthrough, passthrough_mount
from kvfuse_bench.measures import MIB

SIDES = ["kvfuse", "C", "pyfuse3", "tmpfs", "kvfuse on disk", "disk"]
ROWS = {
    "store": ["store 64KiB, files", "store 64KiB, blocks", "store 1MiB, files", "store 1MiB, blocks"],
    "read": ["open, read, close 64KiB, files", "open, read, close 64KiB, blocks"],
    "absent": ["absent names, files", "absent names, blocks"],
    "cold": [f"read 1MiB cold{which}, {kind}" for kind in ("files", "blocks") for which in ("", " again")],
    "pages": [
        f"pages 2MiB {what}, {kind}" for kind in ("files", "blocks") for what in ("written", "read", "read again")
    ],
    "names": [
        "30 empty files: make",
        "30 empty files: list, stat",
        "30 empty files: remove",
        "20 files kept open",
        "deep tree: make",
        "deep tree: walk",
        "deep tree: remove",
    ],
    "tools": [
        f"small files: {tool}" for tool in ("tar -x", "find", "tar -c", "git add", "git commit", "git status", "rm -rf")
    ],
}


def run_door(tmp_path: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    places = ("--folder", str(tmp_path), "--output", str(tmp_path / "results"))
    command = [sys.executable, "-m", "kvfuse.cli", "bench", "door", "--rounds", "1", "--scale", "0.001", *places]
    env = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")} | environment
    return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=200, check=False, env=env)


def test_the_table_has_all_rows_and_sides(tmp_path: Path) -> None:
    done = run_door(tmp_path, "--disk")
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    assert all(side in lines[1] for side in [*SIDES, "of C"])
    named = [line.strip().split("  ")[0] for line in lines[3:]]
    assert named == [row for rows in ROWS.values() for row in rows]
    (result,) = (tmp_path / "results").iterdir()
    figures = json.loads(result.read_text())["figures"]
    assert [figure["name"] for figure in figures] == named
    for figure in figures:
        found = {other["name"]: other["value"] for other in (figure["reference"], *figure["others"])}
        assert [name for name in found if ":" not in name] == SIDES[1:]
        assert figure["value"] > 0
        assert all(value > 0 for name, value in found.items() if ":" not in name)
        assert found["kvfuse: daemon us"] >= 0
    assert {path.name for path in tmp_path.iterdir()} == {"results", "cache"}, "volumes are gone"


def test_without_a_compiler_its_column_is_left_out(tmp_path: Path) -> None:
    done = run_door(tmp_path, "--only", "absent", "--json", CC="/nonexistent/cc")
    assert done.returncode == 0, done.stderr
    assert "no column 'C': /nonexistent/cc is not installed" in done.stderr
    figure = json.loads(done.stdout)["figures"][0]
    assert figure["reference"]["name"] == "pyfuse3"
    assert "C: daemon us" not in [other["name"] for other in figure["others"]]


# -- the file system in C


@pytest.fixture
def passthrough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, Path]]:
    """The directory below, and the mount."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    try:
        program = compile_passthrough()
    except MountError as error:
        pytest.skip(str(error))
    assert compile_passthrough() == program, "once for each source"
    below, point = tmp_path / "below", tmp_path / "mnt"
    with passthrough_mount(program, below, point):
        assert os.path.ismount(point)
        yield below, point
    assert not os.path.ismount(point)


def test_it_stores_and_reads_the_right_bytes(passthrough: tuple[Path, Path]) -> None:
    below, point = passthrough
    data = os.urandom(3 * MIB + 17)
    (point / "folder").mkdir()
    (point / "folder" / "new").write_bytes(data)
    (point / "folder" / "new").rename(point / "block")
    assert (below / "block").read_bytes() == data
    measures.drop_cached(point / "block")
    assert (point / "block").read_bytes() == data
    with (point / "block").open("r+b") as file:
        file.seek(MIB)
        file.write(b"changed")
        file.truncate(2 * MIB)
    changed = data[:MIB] + b"changed" + data[MIB + 7 : 2 * MIB]
    assert (below / "block").read_bytes() == changed
    measures.drop_cached(point / "block")
    assert (point / "block").read_bytes() == changed


def test_it_keeps_names(passthrough: tuple[Path, Path]) -> None:
    below, point = passthrough
    names = sorted(f"{number:050}" for number in range(1000))
    for name in names:
        (point / name).touch(mode=0o640)
    assert sorted(os.listdir(point)) == sorted(os.listdir(below)) == names
    os.utime(point / names[0], ns=(10**18, 2 * 10**18))
    (point / names[0]).chmod(0o600)
    os.link(point / names[0], point / "link")
    found = (point / "link").stat()
    assert (found.st_mode & 0o777, found.st_mtime_ns, found.st_nlink) == (0o600, 2 * 10**18, 2)
    with pytest.raises(FileNotFoundError):
        (point / "absent").stat()
    for name in [*names, "link"]:
        (point / name).unlink()
    assert os.listdir(point) == os.listdir(below) == []
