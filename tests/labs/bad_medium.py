"""A file whose medium has bad sectors: ``bad_medium.py FILE MOUNTPOINT`` serves it as ``MOUNTPOINT/file``.

While ``FILE.bad`` is there, reads of the bytes that it names ("START END") end in EIO, as those of a bad sector do; a
page of them that is mapped is SIGBUS. While ``FILE.sick`` is there, so do writes of the bytes that it names
("START END START END ..."), or all syncs where it names none. Everything else is the file's. Tests bind-mount it over
the file. A line on stdin has the kernel forget all of its pages, mapped or not; a line answers.
"""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyfuse3
import trio
from mounting import PATIENCE_S, wait_until

NAME = b"file"
INODE = pyfuse3.InodeT(2)


class _Medium(pyfuse3.Operations):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self.descriptor = os.open(path, os.O_RDWR)
        self.bad = path.with_name(path.name + ".bad")
        self.sick = path.with_name(path.name + ".sick")

    def _refused(self) -> list[range] | None:
        """Bytes that it does not take; none of them: no sync; None: it is well."""
        try:
            numbers = list(map(int, self.sick.read_text().split()))
        except FileNotFoundError:
            return None
        return [range(*pair) for pair in zip(numbers[::2], numbers[1::2], strict=True)]

    async def getattr(self, inode: pyfuse3.InodeT, ctx: object = None) -> pyfuse3.EntryAttributes:
        entry = pyfuse3.EntryAttributes()
        entry.st_ino = inode
        entry.st_mode = 0o40755 if inode == pyfuse3.ROOT_INODE else 0o100600
        entry.st_size = os.fstat(self.descriptor).st_size if inode == INODE else 0
        entry.st_nlink = 1
        return entry

    async def setattr(self, inode, attr, fields, fh, ctx):  # type: ignore[no-untyped-def]
        if fields.update_size:
            os.ftruncate(self.descriptor, attr.st_size)
        return await self.getattr(inode)

    async def lookup(self, parent_inode: pyfuse3.InodeT, name: bytes, ctx: object) -> pyfuse3.EntryAttributes:
        if name != NAME:
            raise pyfuse3.FUSEError(errno.ENOENT)
        return await self.getattr(INODE)

    async def open(self, inode: pyfuse3.InodeT, flags: int, ctx: object) -> pyfuse3.FileInfo:
        return pyfuse3.FileInfo(fh=pyfuse3.FileHandleT(inode), keep_cache=True)

    async def read(self, fh: int, off: int, size: int) -> bytes:
        with contextlib.suppress(FileNotFoundError):
            start, end = map(int, self.bad.read_text().split())
            if off < end and start < off + size:
                raise pyfuse3.FUSEError(errno.EIO)
        return os.pread(self.descriptor, size, off)

    async def write(self, fh: int, off: int, buf: bytes) -> int:
        if any(off < one.stop and one.start < off + len(buf) for one in self._refused() or ()):
            raise pyfuse3.FUSEError(errno.EIO)
        return os.pwrite(self.descriptor, buf, off)

    async def fsync(self, fh: int, datasync: bool) -> None:
        if self._refused() == []:
            raise pyfuse3.FUSEError(errno.EIO)
        os.fdatasync(self.descriptor)


class BadMedium:
    """``path`` lies on a medium of its own, until the end."""

    def __init__(self, path: Path, server: subprocess.Popen[str]) -> None:
        self._path = path
        self._server = server
        self._marker = path.with_name(path.name + ".bad")
        self._sick = path.with_name(path.name + ".sick")

    def refuse(self, *ranges: range) -> None:
        """Writes of these bytes fail; without any, all syncs do."""
        made = self._sick.with_name(self._sick.name + ".new")
        made.write_text(" ".join(f"{one.start} {one.stop}" for one in ranges))
        made.rename(self._sick)

    def break_bytes(self, start: int, end: int) -> None:
        """Pages from ``start`` to ``end`` cannot be read any more, and are in no cache."""
        self._marker.write_text(f"{start} {end}")
        assert self._server.stdin
        assert self._server.stdout
        self._server.stdin.write("forget\n")
        self._server.stdin.flush()
        assert self._server.stdout.readline() == "forgotten\n"

    def mend(self) -> None:
        self._marker.unlink(missing_ok=True)
        self._sick.unlink(missing_ok=True)


@contextmanager
def bad_medium(path: Path, mountpoint: Path) -> Iterator[BadMedium]:
    """Have the file on such a medium. Nobody has it open."""
    mountpoint.mkdir()
    command = [sys.executable, __file__, str(path), str(mountpoint)]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    medium = BadMedium(path, server)
    try:
        wait_until((mountpoint / "file").exists, "the medium")
        subprocess.run(["mount", "--bind", str(mountpoint / "file"), str(path)], check=True)
        yield medium
    finally:
        subprocess.run(["umount", "-l", str(path)], check=False)
        subprocess.run(["umount", "-l", str(mountpoint)], check=False)
        server.terminate()
        server.communicate(timeout=PATIENCE_S)
        medium.mend()


def _forget() -> None:
    for _ in sys.stdin:
        pyfuse3.invalidate_inode(INODE)
        print("forgotten", flush=True)


def main() -> None:
    path, mountpoint = Path(sys.argv[1]), sys.argv[2]
    pyfuse3.init(_Medium(path), mountpoint, {"fsname=bad_medium", *pyfuse3.default_options})
    threading.Thread(target=_forget, daemon=True).start()
    try:
        trio.run(pyfuse3.main)
    finally:
        pyfuse3.close(unmount=False)


if __name__ == "__main__":
    main()
