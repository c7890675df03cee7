"""WebDAV, class 1, as far as file managers need it: /dav/PATH. Files are those of /v1/files.

The body of a PROPFIND is not read: every answer has the same few properties. PROPPATCH changes none. There are no
locks, and folders are not copied.
"""

from __future__ import annotations

import stat
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from email.utils import formatdate
from urllib.parse import quote_from_bytes

from kvfuse import errors
from kvfuse.http.file_resources import FileResources
from kvfuse.http.name_resources import LISTED_AT_ONCE, NameResources
from kvfuse.http.path_walk import READ, SEARCH, FoundPath, PathWalk
from kvfuse.http.routes import Route
from kvfuse.http.web_message import Streamed, WebAnswer, WebError, WebRequest, split_target
from kvfuse.volume.api import ROOT_INODE, VIRTUAL_NAME, RingApi

PREFIX = b"dav"
XML = 'application/xml; charset="utf-8"'
ENTRIES_MAX = 10_000
"""names of a folder that one PROPFIND tells"""
DEPTH_MAX = 64
"""folders in each other that one DELETE removes"""
METHODS = "OPTIONS, GET, HEAD, PUT, DELETE, PROPFIND, PROPPATCH, MKCOL, MOVE, COPY"


@dataclass
class DavResources:
    """The handlers."""

    volume: RingApi
    files: FileResources
    names: NameResources

    def routes(self) -> list[Route]:
        """Of which openapi.json says nothing: it has no words for these methods."""
        handlers = {
            "OPTIONS": self.options, "GET": self.get, "PUT": self.files.put, "DELETE": self.delete, "MOVE": self.move,
            "PROPFIND": self.find, "PROPPATCH": self.refuse, "MKCOL": self.make_folder, "COPY": self.copy,
        }  # fmt: skip
        return [Route(method, "/dav/{path}", "WebDAV", handler) for method, handler in handlers.items()]

    def _walk(self, request: WebRequest) -> PathWalk:
        return PathWalk(self.volume, request.caller, request.tokens)

    async def options(self, request: WebRequest) -> WebAnswer:
        return WebAnswer(200, headers=(("DAV", "1"), ("Allow", METHODS), ("MS-Author-Via", "DAV")))

    async def refuse(self, request: WebRequest) -> WebAnswer:
        raise errors.NotPermitted("properties are those of the file: PATCH /v1/attributes changes them")

    async def get(self, request: WebRequest) -> WebAnswer:
        return await self.files.get(request)

    async def find(self, request: WebRequest) -> WebAnswer:
        """The properties of a file or folder, and with depth 1 of what is in it."""
        depth = request.headers.get("depth", "infinity")
        if depth not in ("0", "1"):
            raise WebError(403, f"the depth {depth!r} is not offered", "ask with Depth: 0 or 1")
        async with self._walk(request) as walk:
            found = await walk.find(request.path)
            rows = [_describe(request.path, found)]
            if depth == "1" and found.is_directory:
                walk.check(found, READ)
                walk.check(found, SEARCH)
                for one in await self._list(found):
                    rows.append(_describe((*request.path, one.name), one))
        text = "".join(rows)
        body = f'<?xml version="1.0" encoding="utf-8"?>\n<D:multistatus xmlns:D="DAV:">{text}</D:multistatus>\n'
        return WebAnswer(207, body.encode(), XML)

    async def _list(self, folder: FoundPath) -> list[FoundPath]:
        """What is in a folder. WebError 507: too much."""
        rows, after, is_last = list[FoundPath](), 0, False
        await self.volume.tree.open_directory(folder.ino)
        while not is_last:
            page = await self.volume.tree.list_directory(folder.ino, after, LISTED_AT_ONCE)
            is_last = len(page) < LISTED_AT_ONCE
            for name, cookie, one in page:
                after = cookie
                if not (folder.ino == ROOT_INODE and name == VIRTUAL_NAME):
                    rows.append(FoundPath.copy(one, folder.ino, name, has_token=folder.has_token))
            if len(rows) > ENTRIES_MAX:
                raise WebError(
                    507, f"the folder has more than {ENTRIES_MAX} names", "GET /v1/folders lists it in pages"
                )
        return rows

    async def make_folder(self, request: WebRequest) -> WebAnswer:
        if request.body.size != 0:
            raise WebError(415, "a MKCOL has no body here")
        try:
            return await self.names.make_folder(request)
        except errors.NotFound as error:
            raise WebError(409, str(error), "make the folder above first") from error
        except errors.Exists as error:
            raise WebError(405, str(error)) from error

    async def delete(self, request: WebRequest) -> WebAnswer:
        """Remove a file, or a folder with all that is in it."""
        async with self._walk(request) as walk:
            found = await walk.find(request.path, follows=False)
        if not found.is_directory:
            return await self.files.delete(request)
        return await self._remove_all(request, 0)

    async def _remove_all(self, request: WebRequest, depth: int) -> WebAnswer:
        """Remove a folder and what is in it, each as if it were asked for alone."""
        if depth > DEPTH_MAX:
            raise WebError(409, f"there are more than {DEPTH_MAX} folders in each other", "remove the inner ones first")
        async with self._walk(request) as walk:
            folder = await walk.find(request.path, follows=False)
            walk.check(folder, READ)
            inner = await self._list(folder)
        for one in inner:
            below = replace(request, path=(*request.path, one.name))
            await (self._remove_all(below, depth + 1) if one.is_directory else self.files.delete(below))
        return await self.names.remove_folder(request)

    async def move(self, request: WebRequest) -> WebAnswer:
        target, is_new = await self._destination(request)
        how = "new" if is_new or request.headers.get("overwrite", "T") == "F" else "replace"
        to = "/" + "/".join(name.decode("utf-8", "surrogateescape") for name in target)
        await self.names.rename(replace(request, query={"to": to, "how": how}))
        return WebAnswer(201 if is_new else 204)

    async def copy(self, request: WebRequest) -> WebAnswer:
        """Copy a file."""
        target, is_new = await self._destination(request)
        async with self._walk(request) as walk:
            found = await walk.find(request.path)
            if found.is_directory:
                raise errors.IsADirectory("folders are not copied here: copy what is in them")
        source = await self.files.get(replace(request, method="GET", headers={}))
        content = source.body
        assert isinstance(content, Streamed)
        try:
            await self.files.put(replace(request, path=target, headers={}, body=_Copied(content)))
        finally:
            await content.release()
        return WebAnswer(201 if is_new else 204)

    async def _destination(self, request: WebRequest) -> tuple[tuple[bytes, ...], bool]:
        """(names of the header Destination, nothing has that path). WebError 400, 412."""
        target, _ = split_target(request.headers.get("destination", "").encode("latin-1"))
        if target[:1] != (PREFIX,) or len(target) < 2:
            raise WebError(400, "the header Destination is to be a path below /dav/")
        async with self._walk(request) as walk:
            try:
                await walk.find(target[1:], follows=False)
            except errors.NotFound:
                return target[1:], True
        if request.headers.get("overwrite", "T").upper() == "F":
            raise WebError(412, "the destination exists")
        return target[1:], False


class _Copied:
    """The bytes of a file as the body of a request (`RequestBody`)."""

    def __init__(self, content: Streamed) -> None:
        self._content = content
        self.size = content.size

    async def pieces(self) -> AsyncIterator[bytes]:
        async for piece in self._content.pieces:
            yield bytes(piece)

    async def read_all(self, size_max: int) -> bytes:
        return b"".join([piece async for piece in self.pieces()])


def _describe(path: tuple[bytes, ...], found: FoundPath) -> str:
    """A D:response."""
    href = "/dav/" + "/".join(quote_from_bytes(name, "") for name in path)
    href += "/" if found.is_directory and not href.endswith("/") else ""
    kind = "<D:collection/>" if found.is_directory else ""
    size = f"<D:getcontentlength>{found.size}</D:getcontentlength>" if stat.S_ISREG(found.mode) else ""
    etag = "" if found.is_directory else f"<D:getetag>{found.etag}</D:getetag>"
    changed = formatdate(max(0, found.mtime) // 10**9, usegmt=True)
    return (
        f"<D:response><D:href>{href}</D:href><D:propstat><D:prop><D:resourcetype>{kind}</D:resourcetype>"
        f"{size}{etag}<D:getlastmodified>{changed}</D:getlastmodified></D:prop>"
        "<D:status>HTTP/1.1 200 OK</D:status></D:propstat></D:response>"
    )
