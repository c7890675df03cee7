"""kvfuse load"""

from __future__ import annotations

import errno
import os
import stat
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

import click

from kvfuse.cli import Failure
from kvfuse.cli.console import doing, note, say
from kvfuse.cli.dump_lines import (
    FOLDER_SETTINGS,
    KINDS,
    FileLine,
    FolderLine,
    NamedLine,
    SpecialLine,
    SymlinkLine,
    counts_text,
    read_lines,
    unpacked_xattrs,
)
from kvfuse.cli.mounts import mount_of
from kvfuse.cli.namespace import NAMESPACE, change_attribute, read_settings

NOT_LOADED = frozenset({"token"})
"""settings of namespaces that a dump has no values of"""
OF_THE_VOLUME = frozenset({"kind", "capacity"})
"""settings of the root that are the volume's own"""
FAILURES_MAX = 20
"""that are shown"""


@click.command()
@click.argument("folder", type=Path)
@click.argument("source", type=click.File("rb"), default="-")
def load(folder: Path, source: IO[bytes]) -> None:
    """Make the folders and namespaces of a dump in FOLDER, a mount or a folder in one. SOURCE: the dump [stdin].

    Made are folders, with mode, owner, times and extended attributes; namespaces with all settings but tokens; symbolic
    links, named pipes, devices, and files without bytes. Left out are files with bytes and blocks, which a dump does
    not have, further names of a file, and sockets. What is there already stays as it is, so the command can be
    repeated; FOLDER itself gets the settings of the root. It says how much was made and left out.

    \b
    Examples:
      kvfuse load /mnt/new < kv.jsonl
      kvfuse load /mnt/new/restored kv.jsonl

    Exit status: 0 done, 1 something that is in the dump could not be made.
    """
    mount_of(folder)
    if not folder.is_dir():
        raise Failure(f"{folder} is no folder")
    loader = _Loader(folder.absolute())
    with doing(f"loading into {folder}"):
        for line in read_lines(source):
            loader.load(line)
        loader.set_times()
    say(f"made {counts_text(loader.made)}")
    for reason, counts in loader.left_out.items():
        say(f"left out, {reason}: {counts_text(counts)}")
    for text in loader.failures[:FAILURES_MAX]:
        note(text)
    if loader.failures:
        raise Failure(f"{len(loader.failures)} things could not be made as they were")


class _Loader:
    """Makes what lines say, below a folder."""

    def __init__(self, top: Path) -> None:
        self._top = top
        self._real_top = Path(os.path.realpath(top))
        self._times: list[tuple[Path, FolderLine]] = []
        """folders that were made: what is made in them changes theirs"""
        self.made: Counter[str] = Counter()
        self.left_out: dict[str, Counter[str]] = {}
        self.failures: list[str] = []
        """in words"""

    def load(self, line: FolderLine | FileLine | SymlinkLine | SpecialLine) -> None:
        """Failure: its path leads elsewhere. What cannot be made is noted."""
        path = self._place(line.path)
        try:
            if isinstance(line, FolderLine):
                self._load_folder(path, line)
            elif isinstance(line, FileLine):
                self._load_file(path, line)
            elif isinstance(line, SymlinkLine):
                self._make(path, line, "symbolic link", lambda: os.symlink(line.target, path))
            else:
                self._load_special(path, line)
        except (OSError, Failure) as error:
            reason = error.message if isinstance(error, Failure) else f"{path}: {error.strerror}"
            self.failures.append(reason)

    def set_times(self) -> None:
        """Of folders, when all is in them."""
        for path, line in reversed(self._times):
            with suppress(OSError):
                os.utime(path, ns=(line.mtime, line.mtime))

    def _place(self, path: str) -> Path:
        parts = path.split("/")
        if parts[0] or ".." in parts or "." in parts:
            raise Failure(f"the dump has the path {path!r}: they begin with a slash, and have no '.' and '..'")
        names = [part for part in parts if part]
        above = Path(os.path.realpath(self._top.joinpath(*names[:-1])))
        if above != self._real_top.joinpath(*names[:-1]):
            raise Failure(f"{path!r} of the dump leads out of {self._top}, by a symbolic link that is there")
        return self._top.joinpath(*names)

    def _load_folder(self, path: Path, line: FolderLine) -> None:
        if path == self._top:
            self._take_over_root(line)
            return
        try:
            path.mkdir()
        except FileExistsError:
            self._leave("as it is there already", "folder")
            return
        if line.namespace is not None:
            self._set_namespace(path, line.namespace, NOT_LOADED)
            self.made["namespace"] += 1
        for name in FOLDER_SETTINGS:  # it has inherited those of the folder above
            with suppress(OSError):
                os.removexattr(path, name)
        self._finish(path, line)
        self.made["folder"] += 1
        self._times.append((path, line))

    def _take_over_root(self, line: FolderLine) -> None:
        """Settings of the namespace, where it is one here, too."""
        if line.namespace is not None and read_settings(self._top) is not None:
            self._set_namespace(self._top, line.namespace, NOT_LOADED | OF_THE_VOLUME)
        self._set_attributes(self._top, line)

    def _set_namespace(self, path: Path, settings: dict[str, str], left_out: frozenset[str]) -> None:
        """Failure: it cannot have them."""
        if settings.get("token") == "set":
            self._leave("as dumps have no secrets ('kvfuse namespace set PATH token=generate')", "token")
        words = " ".join(f"{name}={value}" for name, value in settings.items() if name not in left_out)
        change_attribute(path, os.setxattr, NAMESPACE, os.fsencode(words))

    def _load_file(self, path: Path, line: FileLine) -> None:
        if line.link:
            self._leave("as a dump has no bytes", "further name of a file")
        elif line.size:
            self._leave("as a dump has no bytes", "file")
        else:
            self._make(path, line, "empty file", lambda: os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)))

    def _load_special(self, path: Path, line: SpecialLine) -> None:
        kinds = dict(zip(KINDS, (stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFCHR, stat.S_IFBLK), strict=True))
        if line.kind not in kinds:
            raise Failure(f"{path}: {line.kind!r} is no kind of file; those are {', '.join(KINDS)}")
        if line.kind == "socket":
            self._leave("as the program makes it that listens there", "socket")
            return
        device = os.makedev(line.major, line.minor)
        self._make(path, line, line.kind, lambda: os.mknod(path, kinds[line.kind] | 0o600, device))

    def _make(self, path: Path, line: NamedLine, what: str, make: Callable[[], None]) -> None:
        try:
            make()
        except FileExistsError:
            self._leave("as it is there already", what)
            return
        self._finish(path, line)
        with suppress(OSError):
            os.utime(path, ns=(line.mtime, line.mtime), follow_symlinks=False)
        self.made[what] += 1

    def _finish(self, path: Path, line: NamedLine) -> None:
        """Owner, attributes, mode: in this order, as each may end what comes before it."""
        try:
            os.chown(path, line.uid, line.gid, follow_symlinks=False)
        except PermissionError:
            self._leave("as only root may give them away", "owner")
        self._set_attributes(path, line)
        if not isinstance(line, SymlinkLine):
            path.chmod(line.mode)

    def _set_attributes(self, path: Path, line: NamedLine) -> None:
        for name, value in unpacked_xattrs(line).items():
            try:
                os.setxattr(path, name, value, follow_symlinks=False)
            except OSError as error:
                if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.EACCES):
                    raise
                self._leave("as this user may not set them", "extended attribute")

    def _leave(self, reason: str, what: str) -> None:
        self.left_out.setdefault(reason, Counter())[what] += 1
