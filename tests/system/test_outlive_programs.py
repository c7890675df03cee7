"""Programs that know nothing of it, while the daemon of their mount is killed, or replaced, over and over.

None of them may fail, or find other bytes than it wrote, or say anything that it would not say elsewhere.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from interruptions import KINDS, run_beside
from mounting import KvfuseMount, temporary_mount
from scale import scaled

pytestmark = pytest.mark.ring(3)

WORDS = ("outlive", "standby", "volume.capacity=2GiB", "volume.segment_size=64MiB")
ROUNDS = 3
"""kills, or upgrades, that each program sees at least"""
LIMIT_S = 280
"""of one run of a program"""
Program = Callable[[Path, Path, random.Random], None]
"""``(folder in the mount, folder elsewhere, chance)``: runs once, within seconds; may run again in the same folders"""


def run(*command: object, cwd: Path | None = None) -> str:
    """What a program that succeeds prints, where it has nothing to complain of."""
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=LIMIT_S, cwd=cwd)
    assert done.returncode == 0, f"{' '.join(words)}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


# -- bytes -------------------------------------------------------------------------------------------


def fio(*words: str) -> Program:
    """Writes at random places and compares, some of it while it writes; slow enough to be interrupted."""

    def work(folder: Path, elsewhere: Path, chance: random.Random) -> None:
        common = ["--name=job", "--verify=crc32c", "--verify_fatal=1", "--do_verify=1", "--verify_backlog=200"]
        place = [f"--directory={folder}", f"--randseed={chance.randrange(1 << 30)}", "--fallocate=none", "--minimal"]
        run("fio", *common, *place, *words, cwd=elsewhere)

    return work


def dd(folder: Path, elsewhere: Path, chance: random.Random) -> None:
    source, target = elsewhere / "source", folder / "target"
    source.write_bytes(chance.randbytes(6_000_000))
    for size in ("4k", "100001", "1M"):
        for words in (["conv=fsync"], [], ["conv=notrunc,fdatasync"]):
            run("dd", f"if={source}", f"of={target}", f"bs={size}", "status=none", *words)
            run("cmp", source, target)
    run("dd", f"if={source}", f"of={target}", "bs=1M", "oflag=append", "conv=notrunc", "status=none")
    assert target.read_bytes() == 2 * source.read_bytes()
    run("dd", f"if={target}", f"of={folder / 'copy'}", "bs=64k", "iflag=direct", "oflag=direct", "status=none")
    run("cmp", target, folder / "copy")
    run("truncate", "-s", "100", target)
    target.unlink()


# -- trees -------------------------------------------------------------------------------------------


def git(folder: Path, elsewhere: Path, chance: random.Random) -> None:
    source, clone = elsewhere / "source", folder / "clone"
    words = ["git", "-c", "user.name=somebody", "-c", "user.email=somebody@example.com"]
    if not source.exists():
        run("git", "init", "-q", "-b", "trunk", source)
        grow(source, chance, 150)
        run(*words, "add", ".", cwd=source)
        run(*words, "commit", "-qm", "all", cwd=source)
    run("git", "clone", "-q", "--no-hardlinks", source, clone)
    run("git", "fsck", "--strict", cwd=clone)
    assert run("git", "status", "--short", cwd=clone) == ""
    run("git", "checkout", "-qb", "branch", cwd=clone)
    for number in range(3):
        grow(clone / f"more-{number}", chance, 10)
        run(*words, "add", ".", cwd=clone)
        run(*words, "commit", "-qm", f"commit {number}", cwd=clone)
    run("git", "checkout", "-q", "trunk", cwd=clone)
    run("git", "checkout", "-q", "branch", cwd=clone)
    run("git", "gc", "-q", cwd=clone)
    run("git", "fsck", "--strict", cwd=clone)
    assert run("git", "status", "--short", cwd=clone) == ""
    assert len(run("git", "log", "--oneline", cwd=clone).splitlines()) == 4
    run("rm", "-r", clone)


def grow(folder: Path, chance: random.Random, count: int) -> None:
    """Folders with so many files."""
    for number in range(count):
        place = folder / f"folder {number % 7}" / f"{number % 3}"
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{number}").write_bytes(chance.randbytes(int(60_000 ** chance.random())))


def trees(folder: Path, elsewhere: Path, chance: random.Random) -> None:
    source = elsewhere / "source"
    if not source.exists():
        grow(source, chance, 150)
        (source / "link").symlink_to("folder 1")
        os.link(source / "folder 1" / "1" / "1", source / "second name")
        run("tar", "-C", source, "-cf", elsewhere / "tar", ".")
    listed = sorted(run("find", ".", cwd=source).splitlines())
    first, second, third = (folder / name for name in ("first", "second", "third"))
    run("cp", "-a", source, first)
    run("diff", "-r", "--no-dereference", source, first)
    assert sorted(run("find", ".", cwd=first).splitlines()) == listed
    second.mkdir()
    run("tar", "-C", second, "-xf", elsewhere / "tar")
    run("diff", "-r", "--no-dereference", first, second)
    assert (second / "second name").stat().st_nlink == 2
    run("tar", "-C", first, "--compare", "-f", elsewhere / "tar")  # modes, owners, times, too
    run("tar", "-C", second, "--compare", "-f", elsewhere / "tar")
    run("mv", second, third)
    run("cp", "-r", third, folder / "fourth")
    run("diff", "-r", "--no-dereference", source, folder / "fourth")
    run("rsync", "-aH", f"{source}/", folder / "fifth")
    assert run("rsync", "-aHnc", "--itemize-changes", "--delete", f"{source}/", folder / "fifth") == ""
    run("rm", "-r", *folder.iterdir())
    assert list(folder.iterdir()) == []


# -- databases ---------------------------------------------------------------------------------------

DATABASE = """
import os, sqlite3, sys, time
path, mode, pause = sys.argv[1], sys.argv[2], float(sys.argv[3])
data = sqlite3.connect(path, timeout=250, isolation_level=None)
assert data.execute(f"pragma journal_mode = {mode}").fetchone() == (mode,)
data.execute("pragma cache_size = 20")  # pages: what has no room is written before the commit
data.execute("create table if not exists t (number integer primary key, content blob)")
def found():
    return dict(data.execute("select number, content from t"))
before = found()
for end in ("rollback", "commit"):
    data.execute("begin")
    rows = dict(before)
    for count in range(150):
        number = len(rows)
        rows[number] = os.urandom(count * 40)
        data.execute("insert into t values (?, ?)", (number, rows[number]))
        other = number * 37 % len(rows)
        rows[other] = os.urandom(count * 20)
        data.execute("update t set content = ? where number = ?", (rows[other], other))
        time.sleep(pause)  # so that it is long: what is sought is an interruption within
    assert found() == rows, "inside"
    data.execute(end)
    assert found() == (rows if end == "commit" else before), "after the " + end
assert data.execute("pragma integrity_check").fetchone() == ("ok",)
data.close()
"""


def sqlite(mode: str) -> Program:
    def work(folder: Path, elsewhere: Path, chance: random.Random) -> None:
        run(sys.executable, "-c", DATABASE, folder / "database", mode, "0.005")

    return work


# -- all of them -------------------------------------------------------------------------------------

GROUPS: dict[str, dict[str, Program]] = {
    "bytes": {
        "psync": fio("--rw=randwrite", "--bs=4k", "--size=4m", "--ioengine=psync", "--rate_iops=500"),
        "libaio": fio(
            "--rw=randwrite", "--bs=16k", "--size=8m", "--direct=1", "--ioengine=libaio", "--iodepth=16",
            "--rate_iops=200",
        ),
        "mmap": fio("--rw=randwrite", "--bs=4k", "--size=4m", "--ioengine=mmap", "--rate_iops=500"),
        "dd": dd,
    },
    "trees": {"git": git, "trees": trees},
    "databases": {"delete": sqlite("delete"), "wal": sqlite("wal")},
}  # fmt: skip
TOOLS = {"bytes": ("fio", "dd", "cmp"), "trees": ("git", "rsync", "tar", "diff"), "databases": ()}
"""scripts/test installs them: one is missing only where somebody runs pytest by himself"""


@pytest.fixture
def mount() -> Iterator[KvfuseMount]:
    with temporary_mount(WORDS) as mounted:
        yield mounted


@pytest.mark.timeout(600)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("kind", KINDS)
def test_programs_do_not_notice(mount: KvfuseMount, tmp_path: Path, kind: str, group: str, seed: int) -> None:
    missing = [tool for tool in TOOLS[group] if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed")
    works = {}
    for name, program in GROUPS[group].items():
        folder, elsewhere = mount.point / name, tmp_path / name
        folder.mkdir()
        elsewhere.mkdir()
        works[name] = partial(program, folder, elsewhere)
    run_beside(kind, [mount], seed, works, scaled(ROUNDS))
