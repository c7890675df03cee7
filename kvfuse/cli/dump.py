"""kvfuse dump"""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import click

from kvfuse import __version__
from kvfuse.cli import Failure
from kvfuse.cli.console import doing, note
from kvfuse.cli.dump_lines import (
    FOLDER_SETTINGS,
    KINDS,
    VERSION,
    AnyDumpLine,
    DumpEnd,
    DumpHead,
    FileLine,
    FolderLine,
    SpecialLine,
    SymlinkLine,
    counts_text,
    encode,
    packed_xattrs,
)
from kvfuse.cli.mounts import kvfuse_mounts
from kvfuse.cli.namespace import NAMESPACE, read_settings

SHOWN_EACH = 1000


@click.command()
@click.argument("source", type=Path)
@click.option("-o", "--output", type=click.File("w", lazy=False), default="-", help="A file, in place of stdout.")
@click.option("--folders", is_flag=True, help="Folders and namespaces alone, without names of files and blocks.")
def dump(source: Path, output: IO[str], folders: bool) -> None:
    """Write names, namespaces and metadata of SOURCE as JSON lines; no bytes of files and blocks.

    SOURCE is a mount, a folder in one, or a volume that is not mounted: its folder, or the mount.conf that names it. A
    volume is mounted for that, read-only, at a folder that only you may enter.

    A line has a path, mode, owner, time, size and extended attributes; of a namespace its settings: kind, quotas,
    policy. A token is a secret: it is left out, and so is its hash, which no mount tells; the line says that there is
    one. 'kvfuse load' makes folders and namespaces of the lines in another volume.

    \b
    Examples:
      kvfuse dump /mnt/kv > kv.jsonl
      kvfuse dump /etc/kvfuse/mount.conf --folders -o namespaces.jsonl
    """
    with _reached(source) as top, doing(f"reading {source}") as step:
        dumper = _Dumper(top, has_files=not folders)
        count = 0
        head = DumpHead(version=VERSION, made=int(time.time()), by=__version__, source=str(source))
        for count, line in enumerate(dumper.lines(head), 1):
            output.write(encode(line) + "\n")
            if count % SHOWN_EACH == 0:
                step(f"reading {source}: {count:,} lines")
        output.write(encode(DumpEnd(lines=count)) + "\n")
        output.flush()
    note(f"dumped {counts_text(dumper.counts)}")
    if dumper.tokens:
        note(f"without tokens of {counts_text({'namespace': dumper.tokens})}: set them again where this is loaded")


@contextmanager
def _reached(source: Path) -> Iterator[Path]:
    """A folder of a mount: ``source``, or where the volume is mounted in the body."""
    real = Path(os.path.realpath(source))
    for row in kvfuse_mounts():
        if row.point == real or row.point in real.parents:
            yield source
            return
        if row.source in {str(source.absolute()), str(real)}:
            yield row.point
            return
    with tempfile.TemporaryDirectory(prefix="kvfuse-dump-") as folder:
        point = Path(folder, "mnt")
        point.mkdir()
        _run("mount", str(source), str(point), "-o", "ro,outlive=false,usrbio.enabled=false")
        try:
            yield point
        finally:
            _run("umount", str(point))


def _run(*words: str) -> None:
    """Failure with the command's last words."""
    command = [sys.executable, "-m", "kvfuse.cli", *words]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise Failure(said[-1].removeprefix("kvfuse: ") if said else f"'kvfuse {words[0]}' failed", done.returncode)


class _Dumper:
    """Makes lines of all that is below a folder."""

    def __init__(self, top: Path, *, has_files: bool) -> None:
        self._top = top
        self._has_files = has_files
        self._links: dict[int, str] = {}
        """inode with several names -> path of its first line"""
        self.counts: Counter[str] = Counter()
        self.tokens = 0

    def lines(self, head: DumpHead) -> Iterator[AnyDumpLine]:
        yield head
        left = [self._top]
        while left:
            folder = left.pop()
            yield self._folder(folder)
            with os.scandir(folder) as found:
                entries = sorted(found, key=lambda entry: entry.name)
            left += [Path(entry.path) for entry in reversed(entries) if entry.is_dir(follow_symlinks=False)]
            if self._has_files:
                yield from (self._entry(entry) for entry in entries if not entry.is_dir(follow_symlinks=False))

    def _folder(self, path: Path) -> FolderLine:
        settings = read_settings(path)
        self.counts["folder"] += 1
        if settings is not None:
            self.counts["namespace"] += 1
            self.tokens += settings.get("token") == "set"
        return FolderLine(**self._common(path, path.lstat()), namespace=settings)

    def _entry(self, entry: os.DirEntry[str]) -> AnyDumpLine:
        status = entry.stat(follow_symlinks=False)
        common = self._common(Path(entry.path), status)
        if stat.S_ISREG(status.st_mode):
            self.counts["file"] += 1
            return FileLine(**common, size=status.st_size, link=self._link(status, common["path"]))
        if stat.S_ISLNK(status.st_mode):
            self.counts["symbolic link"] += 1
            return SymlinkLine(**common, target=os.readlink(entry.path))
        self.counts["special file"] += 1
        tests = stat.S_ISFIFO, stat.S_ISSOCK, stat.S_ISCHR, stat.S_ISBLK
        kind = next(kind for kind, test in zip(KINDS, tests, strict=True) if test(status.st_mode))
        return SpecialLine(**common, kind=kind, major=os.major(status.st_rdev), minor=os.minor(status.st_rdev))

    def _link(self, status: os.stat_result, path: str) -> str:
        if status.st_nlink < 2:
            return ""
        first = self._links.setdefault(status.st_ino, path)
        return first if first != path else ""

    def _common(self, path: Path, status: os.stat_result) -> dict[str, Any]:
        return {
            "path": "/" + str(path.relative_to(self._top)).removeprefix("."),
            "mode": stat.S_IMODE(status.st_mode),
            "uid": status.st_uid,
            "gid": status.st_gid,
            "mtime": status.st_mtime_ns,
            "xattrs": packed_xattrs(_xattrs(path, is_folder=stat.S_ISDIR(status.st_mode))),
        }


def _xattrs(path: Path, *, is_folder: bool) -> dict[str, bytes]:
    names = [name for name in os.listxattr(path, follow_symlinks=False) if name != NAMESPACE]
    values = {name: os.getxattr(path, name, follow_symlinks=False) for name in names}
    for name in FOLDER_SETTINGS if is_folder else ():
        with suppress(OSError):
            values[name] = os.getxattr(path, name)
    return values
