"""The lines of a dump: JSON objects, the first one with a version, the last one with the number of lines before it.

Paths begin with "/", the root of what was dumped. Bytes of names that are not UTF-8 are as os.fsdecode has them.
Parents come before what is in them. There are no bytes of files and blocks, and no tokens.
"""

from __future__ import annotations

import base64
import difflib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from kvfuse.cli import Failure

VERSION = 1


class DumpLine(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, tag_field="type"
):
    """Base of all lines."""


class DumpHead(DumpLine, frozen=True, kw_only=True, tag="kvfuse-dump"):
    """The first one."""

    version: int
    made: int
    """seconds since 1970"""
    by: str
    """version of kvfuse"""
    source: str


class NamedLine(DumpLine, frozen=True, kw_only=True):
    """Something with a path. Times are in nanoseconds since 1970."""

    path: str
    mode: int
    """permission bits"""
    uid: int
    gid: int
    mtime: int
    xattrs: dict[str, str] = {}
    """extended attributes, base64"""


class FolderLine(NamedLine, frozen=True, kw_only=True, tag="folder"):
    namespace: dict[str, str] | None = None
    """settings, where the folder is a namespace; of a token only whether it is "set" """


class FileLine(NamedLine, frozen=True, kw_only=True, tag="file"):
    """A file or a block."""

    size: int
    """bytes"""
    link: str = ""
    """path of a line before it that is the same file"""


class SymlinkLine(NamedLine, frozen=True, kw_only=True, tag="symlink"):
    target: str


class SpecialLine(NamedLine, frozen=True, kw_only=True, tag="special"):
    """A named pipe, socket or device."""

    kind: str
    """of `KINDS`"""
    major: int = 0
    minor: int = 0


class DumpEnd(DumpLine, frozen=True, kw_only=True, tag="end"):
    lines: int
    """before this one"""


FOLDER_SETTINGS = "user.kvfuse.publish", "user.kvfuse.chunk_size"
"""extended attributes of folders that lists do not show, and that new folders inherit"""
KINDS = "pipe", "socket", "character device", "block device"
AnyDumpLine = DumpHead | FolderLine | FileLine | SymlinkLine | SpecialLine | DumpEnd


def encode(line: AnyDumpLine) -> str:
    """One line of ASCII: lone surrogates of names stay what they are."""
    return json.dumps(msgspec.to_builtins(line))


def read_lines(lines: Iterable[bytes]) -> Iterator[FolderLine | FileLine | SymlinkLine | SpecialLine]:
    """All but the first and the last one. Failure: it is no dump, of a newer version, or a part of one is missing."""
    count = 0
    for count, text in enumerate(lines, 1):
        line = _decoded(text, count)
        if count == 1:
            _check_head(line)
        elif isinstance(line, DumpEnd):
            if line.lines != count - 1:
                raise Failure(f"line {count}: the dump had {line.lines} lines before this one, here are {count - 1}")
            return
        elif isinstance(line, DumpHead):
            raise Failure(f"line {count}: a second dump begins: load one at a time")
        else:
            yield line
    raise Failure(f"the dump ends after {count} lines without its last one: a part is missing")


def _check_head(line: AnyDumpLine) -> None:
    if not isinstance(line, DumpHead):
        raise Failure("line 1: this is no dump of kvfuse: it does not begin with its version")
    if line.version != VERSION:
        raise Failure(f"the dump is of version {line.version}, this program reads {VERSION}: use kvfuse {line.by}")


def _decoded(text: bytes, number: int) -> AnyDumpLine:
    try:
        line: AnyDumpLine = msgspec.convert(json.loads(text), AnyDumpLine)
    except (ValueError, msgspec.ValidationError) as error:
        raise Failure(f"line {number}: {error}{_nearest(text)}") from None
    return line


def _nearest(text: bytes) -> str:
    """The type that a line with an unknown one may mean."""
    known = [
        str(struct.__struct_config__.tag)
        for struct in (DumpHead, FolderLine, FileLine, SymlinkLine, SpecialLine, DumpEnd)
    ]
    try:
        said = str(json.loads(text)["type"])
    except (ValueError, KeyError, TypeError):
        return ""
    near = difflib.get_close_matches(said, known, 1) if said not in known else []
    return f" - did you mean '{near[0]}'?" if near else ""


def packed_xattrs(values: Mapping[str, bytes]) -> dict[str, str]:
    return {name: base64.b64encode(value).decode() for name, value in values.items()}


def unpacked_xattrs(line: NamedLine) -> dict[str, bytes]:
    """Failure: a value is no base64."""
    try:
        return {name: base64.b64decode(value, validate=True) for name, value in line.xattrs.items()}
    except ValueError as error:
        raise Failure(f"{line.path}: an extended attribute makes no sense: {error}") from None


def counts_text(counts: Mapping[str, Any]) -> str:
    """ "3 folders, 1 file" of {"folder": 3, "file": 1}"""
    return ", ".join(f"{count:,} {what}{'s' if count != 1 else ''}" for what, count in counts.items()) or "nothing"
