"""Blocks by key: one at /v1/blocks/FOLDER/KEY, many at /v1/batch/OPERATION/FOLDER."""

from __future__ import annotations

import errno
import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvfuse import errors
from kvfuse.access.namespace_access import NamespaceAccess
from kvfuse.access.namespace_handle import EXPIRES_MAX, NamespaceHandle
from kvfuse.http.block_access import BlockAccess
from kvfuse.http.block_bodies import CONTENT_TYPE, KEY_BODY_MAX, KEYS_MAX, build_head, parse_body
from kvfuse.http.kernel_drops import KernelDrops
from kvfuse.http.path_walk import SEARCH, PathWalk
from kvfuse.http.web_limits import SharedUnits
from kvfuse.http.web_message import BYTES, JSON, Streamed, WebAnswer, WebError, WebRequest, json_answer
from kvfuse.keys import KEY_SIZE_MAX, file_name, file_names
from kvfuse.sizes import MIB, format_size
from kvfuse.volume.api import RingApi

BLOCK_SIZE_MAX = 64 * MIB
BATCH_SIZE_MAX = 64 * MIB
"""bytes of the blocks of one batch"""
PIECE = 4 * MIB
"""bytes of an answer that are given to the connection at once"""


@dataclass
class BlockResources:
    """The handlers. ``memory``: of bodies."""

    volume: RingApi
    drops: KernelDrops
    memory: SharedUnits

    # -- one -----------------------------------------------------------------------------------------

    async def get_one(self, request: WebRequest) -> WebAnswer:
        """One block; for HEAD the headers alone."""
        access, name = await self._open_one(request, 1)
        if request.method == "GET" and (lent := access.try_hold(name)) is not None:
            return WebAnswer(200, lent, BYTES)
        statuses, sizes = await access.look([name])
        _raise_for(int(statuses[0]))
        if request.method == "HEAD":
            return WebAnswer(200, b"", BYTES, size=int(sizes[0]))
        found, answer = await self._read(request, access, [name], sizes, is_raw=True)
        _raise_for(int(found[0]))
        return answer

    async def put_one(self, request: WebRequest) -> WebAnswer:
        """Store one block."""
        access, name = await self._open_one(request, 3)
        ttl, priority = _terms_of(request)
        size = request.body.size if request.body.size is not None else BLOCK_SIZE_MAX
        if size > BLOCK_SIZE_MAX:
            raise errors.FileTooLarge(f"a block has {format_size(BLOCK_SIZE_MAX)} at most")
        with self.memory.taking(request.caller.uid, size):
            data = await request.body.read_all(BLOCK_SIZE_MAX)
            await access.check(3, [name])  # as of now: the body may have taken its time
            (status,) = await access.put([name], [memoryview(data)], ttl, priority)
        _raise_for(int(status))
        return WebAnswer(204)

    async def delete_one(self, request: WebRequest) -> WebAnswer:
        """Remove one block."""
        access, name = await self._open_one(request, 3)
        (status,) = await access.delete([name])
        _raise_for(int(status))
        return WebAnswer(204)

    # -- many ----------------------------------------------------------------------------------------

    async def exists(self, request: WebRequest) -> WebAnswer:
        """Which of the keys have a block."""
        access, names = await self._open_many(request, 1)
        found = np.frombuffer(await access.exists(names), np.uint8)
        if request.headers.get("content-type", "").partition(";")[0].strip() == JSON:
            return json_answer({"exists": (found != 0).tolist()})
        return _statuses(np.where(found, 0, errno.ENOENT))

    async def prefix(self, request: WebRequest) -> WebAnswer:
        """How many of the keys, which are a chain, have a block before the first that has none."""
        access, names = await self._open_many(request, 1)
        found = await access.exists(names)
        end = found.find(0)
        return json_answer({"count": len(found) if end < 0 else end})

    async def get(self, request: WebRequest) -> WebAnswer:
        """The blocks of many keys."""
        access, names = await self._open_many(request, 1)
        statuses, sizes = await access.look(names)
        if int(sizes.sum()) > BATCH_SIZE_MAX:
            raise WebError(413, f"the blocks have {int(sizes.sum())} bytes: ask for {BATCH_SIZE_MAX} at most")
        return (await self._read(request, access, names, sizes, statuses))[1]

    async def put(self, request: WebRequest) -> WebAnswer:
        """Store many blocks."""
        ttl, priority = _terms_of(request)
        size_max = KEY_BODY_MAX + BATCH_SIZE_MAX
        size = request.body.size if request.body.size is not None else size_max
        if size > size_max:
            raise WebError(413, f"the body has {size} bytes: {size_max} at most are taken")
        await self._open(request, request.path, 3)
        with self.memory.taking(request.caller.uid, size):
            keys, blocks = parse_body(await request.body.read_all(size_max))
            if sum(map(len, blocks)) > BATCH_SIZE_MAX:
                raise WebError(413, f"the blocks have more than {BATCH_SIZE_MAX} bytes")
            names = file_names(keys)
            access = await self._open(request, request.path, 3, names)
            return _statuses(await access.put(names, blocks, ttl, priority))

    async def delete(self, request: WebRequest) -> WebAnswer:
        """Remove many blocks."""
        access, names = await self._open_many(request, 3)
        return _statuses(await access.delete(names))

    async def prefetch(self, request: WebRequest) -> WebAnswer:
        """Bring blocks into the memory of this host."""
        access, names = await self._open_many(request, 1)
        return _statuses(await access.prefetch(names))

    # -- the parts -----------------------------------------------------------------------------------

    async def _read(
        self, request: WebRequest, access: BlockAccess, names: list[bytes], sizes: npt.NDArray[np.int64],
        statuses: npt.NDArray[np.int64] | None = None, *, is_raw: bool = False,
    ) -> tuple[npt.NDArray[np.int64], WebAnswer]:  # fmt: skip
        """Read blocks of known sizes into memory that is charged until the answer is sent."""
        total, user = int(sizes.sum()), request.caller.uid
        self.memory.take(user, total)
        try:
            target = np.empty(total, np.uint8)
            found = await access.get(names, sizes, target)
        except BaseException:
            self.memory.give(user, total)
            raise

        if statuses is not None:
            found[statuses != 0] = statuses[statuses != 0]
        head = b"" if is_raw else build_head(found, np.where(found, 0, sizes))
        if (found != 0).any():
            target = target[np.repeat(found == 0, sizes)]
        self.memory.give(user, total)
        return found, self._charged(request, head, target, BYTES if is_raw else CONTENT_TYPE)

    def _charged(self, request: WebRequest, head: bytes, data: npt.NDArray[np.uint8], kind: str) -> WebAnswer:
        """An answer with bytes that are charged until it is sent."""
        user, size = request.caller.uid, len(data)
        self.memory.take(user, size)

        async def release() -> None:
            self.memory.give(user, size)

        return WebAnswer(200, Streamed(_send(head, data.data), len(head) + size, release), kind)

    async def _open_one(self, request: WebRequest, wanted: int) -> tuple[BlockAccess, bytes]:
        if not request.path:
            raise WebError(404, "the path names no block: it is a folder and a key")
        key = request.path[-1]
        if len(key) > KEY_SIZE_MAX:
            raise errors.NameTooLong(f"a key has {KEY_SIZE_MAX} bytes at most")
        name = file_name(key)
        return await self._open(request, request.path[:-1], wanted, [name]), name

    async def _open_many(self, request: WebRequest, wanted: int) -> tuple[BlockAccess, list[bytes]]:
        """The folder and names of a request whose body has keys alone."""
        body = await request.body.read_all(KEY_BODY_MAX)
        if request.headers.get("content-type", "").partition(";")[0].strip() == JSON:
            keys = _parse_keys(body)
        else:
            keys, blocks = parse_body(body)
            if any(map(len, blocks)):
                raise WebError(400, "the body has blocks, and the request is about keys alone")
        names = file_names(keys)
        return await self._open(request, request.path, wanted, names if wanted & 2 else ()), list(names)

    async def _open(
        self, request: WebRequest, path: tuple[bytes, ...], wanted: int, names: Any = ()
    ) -> BlockAccess:  # fmt: skip
        """The blocks of a folder, which the caller may use so. The rights were found by earlier requests, or now."""
        mode = request.mode(0o644)
        key = path, request.caller, request.tokens, mode
        access: BlockAccess | None = request.remembered.get(key)
        if access is not None and access.namespace.is_checked and access.namespace.gates is self.volume.gates:
            try:
                await access.check(wanted, names)
            except errors.Stale:  # the folder was removed: the path may mean another one
                pass
            else:
                return access
        access = await self._find(request, path, mode, key)
        await access.check(wanted, names)
        return access

    async def _find(self, request: WebRequest, path: tuple[bytes, ...], mode: int, key: object) -> BlockAccess:
        admission = NamespaceAccess(self.volume, request.caller)
        for token in request.tokens:
            admission.add_token(token)
        async with PathWalk(self.volume, request.caller, request.tokens) as walk:
            folder = await walk.find_folder(path)
            walk.check(folder, SEARCH)
            has_token = await admission.check_access(folder.ino)
            group = await admission.find_group(folder.ino)
            namespace = NamespaceHandle(
                folder.ino, mode, group, by_path=not has_token, measures=self.volume.inodes.measures(folder.ino)
            )
            access = BlockAccess(self.volume, admission, namespace, self.drops)
            if not walk.has_followed:  # nobody tells when a link leads elsewhere
                request.remembered[key] = access
            return access


async def _send(head: bytes, data: memoryview) -> AsyncGenerator[bytes | memoryview, None]:
    if head:
        yield head
    for start in range(0, len(data), PIECE):
        yield data[start : start + PIECE]


def _statuses(statuses: npt.NDArray[np.int64]) -> WebAnswer:
    return WebAnswer(200, build_head(statuses), CONTENT_TYPE)


def _raise_for(status: int) -> None:
    if not status:
        return
    kinds: dict[int, type[errors.OperationError]] = {
        errno.ENOENT: errors.NotFound, errno.EACCES: errors.PermissionDenied, errno.ENOSPC: errors.NoSpace,
        errno.EDQUOT: errors.QuotaExceeded, errno.ECANCELED: errors.NotAdmitted, errno.EISDIR: errors.IsADirectory,
        errno.EFBIG: errors.FileTooLarge, errno.EROFS: errors.ReadOnly,
    }  # fmt: skip
    texts = {errno.ENOENT: "there is no such block", errno.EACCES: "the user may not read the block"}
    raise kinds.get(status, errors.EngineError)(texts.get(status, "the block was not stored"))


def _terms_of(request: WebRequest) -> tuple[int, int]:
    """(ttl, priority) of a put. WebError 400."""
    return request.number("ttl", 0, EXPIRES_MAX, 0), request.number("priority", -128, 127, 0)


def _parse_keys(body: bytes) -> list[bytes]:
    """Keys of {"keys": [...]}: text, as UTF-8. WebError 400."""
    try:
        found = json.loads(body)["keys"]
        keys = [key.encode() for key in found] if isinstance(found, list) else []
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WebError(400, 'the body is to be {"keys": ["...", ...]}') from error
    if not 1 <= len(keys) <= KEYS_MAX or not all(1 <= len(key) <= KEY_SIZE_MAX for key in keys):
        raise WebError(400, f"1 to {KEYS_MAX} keys of 1 to {KEY_SIZE_MAX} bytes are taken")
    return keys
