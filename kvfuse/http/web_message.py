"""Defines a request as handlers get it, an answer as they give it, and errors as problem+json (RFC 9457).

Nothing here waits, and nothing knows a volume.
"""

from __future__ import annotations

import difflib
import errno
import json
import os
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias
from urllib.parse import parse_qsl, unquote_to_bytes

from kvfuse import errors
from kvfuse.errnos import errno_of

if TYPE_CHECKING:
    from kvfuse.access.client_process import ClientProcess

JSON = "application/json"
BYTES = "application/octet-stream"
PROBLEM = "application/problem+json"
QUERY_FIELDS_MAX = 16
BODY_JSON_MAX = 64 << 10
"""bytes of a body of JSON"""

_WHOLE_URL = re.compile(rb"^https?://[^/?]*", re.IGNORECASE)

Body: TypeAlias = bytes | bytearray | memoryview


class WebError(errors.KvfuseError):
    """A request that is refused with an HTTP status of its own, whatever errno would say. ``remedy``: what to do."""

    def __init__(self, status: int, message: str, remedy: str = "", headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.remedy = remedy
        self.headers = dict(headers or {})


class RequestBody(Protocol):
    """The body of a request, as its connection reads it. WebError 408: the client is too slow."""

    size: int | None
    """as announced; None: it is not known before its end"""

    def pieces(self) -> AsyncIterator[bytes]: ...
    async def read_all(self, size_max: int) -> bytes:
        """WebError 413 where it is longer."""


@dataclass
class WebRequest:
    """One request. ``path``: names below the prefix of its route, or all of them where no route was found yet."""

    method: str
    path: tuple[bytes, ...]
    query: dict[str, str]
    headers: dict[str, str]
    """by lower-case name"""
    body: RequestBody
    caller: ClientProcess
    tokens: tuple[str, ...] = ()
    """of namespaces, which it shows"""
    remembered: dict[object, Any] = field(default_factory=dict)
    """what requests of one connection share: rights that were found, by what they are about"""

    def number(self, name: str, least: int, most: int, default: int | None = None) -> int:
        """A number of the query. WebError 400."""
        text = self.query.get(name)
        if text is None:
            if default is None:
                raise WebError(400, f"the parameter {name!r} is missing")
            return default
        if not text.isascii() or not text.removeprefix("-").isdigit() or len(text) > 20:
            raise WebError(400, f"{name}={text!r} is no whole number")
        if not least <= int(text) <= most:
            raise WebError(400, f"{name}={text} is not between {least} and {most}")
        return int(text)

    def mode(self, default: int) -> int:
        """Permission bits of the query, in octal digits. WebError 400."""
        text = self.query.get("mode", f"{default:o}")
        if not 1 <= len(text) <= 5 or text.strip("01234567"):
            raise WebError(400, f"mode={text!r} is no octal number such as 0644")
        if int(text, 8) > 0o7777:
            raise WebError(400, f"mode={text} has more than permission bits")
        return int(text, 8)

    async def read_json(self) -> dict[str, Any]:
        """The body, an object of JSON. WebError 400, 413."""
        try:
            found = json.loads(await self.body.read_all(BODY_JSON_MAX))
        except (ValueError, RecursionError) as error:
            raise WebError(400, f"the body is no JSON: {error}") from error
        if not isinstance(found, dict):
            raise WebError(400, "the body is no object of JSON")
        return found


class Streamed(NamedTuple):
    """A body that is made while it is sent. ``size`` None: nobody knows it before its end."""

    pieces: AsyncGenerator[Body, None]
    size: int | None
    release: Callable[[], Awaitable[None]]
    """called once, however the answer ends, also if nothing of it was made"""


class Lent(NamedTuple):
    """A body in memory that stays as it is as long as somebody has ``holder``: it is sent, or copied, at once."""

    data: memoryview
    holder: object

    def __len__(self) -> int:
        return len(self.data)


class WebAnswer(NamedTuple):
    """A status, headers and a body. ``size``: what Content-Length says in place of the body's, for HEAD."""

    status: int
    body: Body | Lent | Streamed = b""
    content_type: str | None = None
    headers: tuple[tuple[str, str], ...] = ()
    size: int | None = None


def json_answer(content: object, status: int = 200, headers: tuple[tuple[str, str], ...] = ()) -> WebAnswer:
    return WebAnswer(status, json.dumps(content).encode() + b"\n", JSON, headers)


STATUS: dict[int, int] = {
    errno.ENOENT: 404, errno.ESTALE: 404, errno.ENODATA: 404, errno.EACCES: 403, errno.EPERM: 403, errno.EROFS: 403,
    errno.EEXIST: 409, errno.ENOTEMPTY: 409, errno.ENOTDIR: 409, errno.EISDIR: 409, errno.EXDEV: 409,
    errno.EMLINK: 409, errno.ELOOP: 409, errno.EINVAL: 400, errno.ENAMETOOLONG: 400, errno.E2BIG: 413,
    errno.EFBIG: 413, errno.ENXIO: 416, errno.EOPNOTSUPP: 405, errno.ENOSPC: 507, errno.EDQUOT: 507,
    errno.ECANCELED: 507, errno.ETIMEDOUT: 504,
}  # fmt: skip
"""errno -> the status of a problem; any other one: 500"""

REMEDIES: dict[int, str] = {
    errno.ENOENT: "check the path; GET /v1/folders/PARENT lists names",
    errno.ESTALE: "it was removed, or the namespace wants a token: send it in the header Kvfuse-Token",
    errno.EACCES: "ask the owner for permission, or send the namespace's token in the header Kvfuse-Token",
    errno.EPERM: "only the owner, or root, may do this",
    errno.EROFS: "the volume is open for reading alone",
    errno.ENOSPC: "remove files, or resize the volume",
    errno.EDQUOT: "remove files of the namespace, or raise its capacity",
    errno.ECANCELED: "the cache did not admit the block: store it again if it is wanted again",
    errno.ETIMEDOUT: "it is not known whether a change happened: look, then repeat it",
}


def problem(error: Exception) -> WebAnswer:
    """The answer to a request that failed. Of an error that nobody expected it says nothing more."""
    if isinstance(error, WebError):
        content: dict[str, Any] = {"title": str(error), "status": error.status}
        if error.remedy:
            content["remedy"] = error.remedy
        return _as_problem(content, error.headers)
    number = errno_of(error) or (error.errno if isinstance(error, OSError) and error.errno else errno.EIO)
    content = {
        "type": f"urn:kvfuse:errno:{errno.errorcode[number]}",
        "title": os.strerror(number),
        "status": STATUS.get(number, 500),
        "errno": errno.errorcode[number],
    }
    if errno_of(error) is not None:
        content["detail"] = str(error)
    if number in REMEDIES:
        content["remedy"] = REMEDIES[number]
    return _as_problem(content, {})


def _as_problem(content: dict[str, Any], headers: Mapping[str, str]) -> WebAnswer:
    return json_answer(content, content["status"], tuple(headers.items()))._replace(content_type=PROBLEM)


def split_target(target: bytes) -> tuple[tuple[bytes, ...], dict[str, str]]:
    """(names of the path, parameters of the query) of a request's target. WebError 400.

    "%2F" separates names, too: no name has a slash.
    """
    path, _, query = _WHOLE_URL.sub(b"", target, 1).partition(b"?")
    if not path.startswith(b"/"):
        raise WebError(400, "the target of the request is no path")
    for part in path.split(b"%")[1:]:
        if len(part) < 2 or part[:2].strip(b"0123456789abcdefABCDEF"):
            raise WebError(400, "the path has a % without two hex digits")
    names = unquote_to_bytes(path).split(b"/")[1:]
    if names and not names[-1]:
        names.pop()
    for name in names:
        if name in (b"", b".", b"..") or b"\0" in name:
            raise WebError(400, f"the path has the name {os.fsdecode(name)!r}, which no file can have")
    return tuple(names), parse_query(query)


def parse_query(query: bytes) -> dict[str, str]:
    """WebError 400."""
    try:
        pairs = parse_qsl(
            query.decode("ascii"), keep_blank_values=True, errors="surrogateescape", max_num_fields=QUERY_FIELDS_MAX
        )
    except ValueError as error:
        raise WebError(400, f"the query cannot be read: {error}") from error
    found = dict(pairs)
    if len(found) < len(pairs):
        raise WebError(400, "the query has a parameter twice")
    return found


def refuse_unknown(given: Mapping[str, Any], known: Mapping[str, Any], what: str) -> None:
    """WebError 400 for a word that is not known, with the nearest one that is."""
    for word in given:
        if word not in known:
            near = difflib.get_close_matches(word, known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(known) or 'none'}"
            raise WebError(400, f"there is no {what} {word!r}", hint)
