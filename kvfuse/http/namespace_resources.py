"""Namespaces: their settings, a new one, the end of one, and all its blocks gone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvfuse import errors
from kvfuse.http.kernel_drops import KernelDrops
from kvfuse.http.path_walk import READ, SEARCH, WRITE, FoundPath, PathWalk
from kvfuse.http.web_message import WebAnswer, WebError, WebRequest, json_answer
from kvfuse.volume.api import RingApi

NAMESPACE = b"user.kvfuse.namespace"
REFUSED = NAMESPACE + b".refused"
CLEAR = b"user.kvfuse.clear"
"""attributes of a folder, by which a volume has its settings read and set"""


@dataclass
class NamespaceResources:
    """The handlers."""

    volume: RingApi
    drops: KernelDrops

    def _walk(self, request: WebRequest) -> PathWalk:
        return PathWalk(self.volume, request.caller, request.tokens)

    async def get(self, request: WebRequest) -> WebAnswer:
        """The settings of a namespace."""
        async with self._walk(request) as walk:
            found = await walk.find_folder(request.path)
            walk.check(found, READ)
            return json_answer(await self._settings_of(found))

    async def create(self, request: WebRequest) -> WebAnswer:
        """Make a folder, or take an empty one, that is a namespace with these settings."""
        text = _words(await request.read_json())
        async with self._walk(request) as walk:
            folder, name = await walk.find_parent(request.path)
            found = await walk.step_if_there(folder, name)
            is_new = found is None
            if found is None:
                walk.check(folder, WRITE | SEARCH)
                made = await self.volume.tree.make_directory(
                    folder.ino, name, request.mode(0o755), walk.caller.make_caller()
                )
                walk.note_made(made.ino)
                found = FoundPath.copy(made, folder.ino, name, has_token=folder.has_token)
            elif await self._is_namespace(found):
                raise errors.Exists(f"{name!r} is a namespace already: PATCH changes its settings")
            try:
                await self._change(walk, found, NAMESPACE, text)
            except errors.KvfuseError:
                if is_new:
                    await self.volume.tree.remove_directory(folder.ino, name)
                raise
            finally:
                await self.drops.drop([(folder.ino, name)], attributes=[found.ino])
            content = await self._settings_of(found)
        return json_answer(content, 201)

    async def change(self, request: WebRequest) -> WebAnswer:
        """Change some settings."""
        text = _words(await request.read_json())
        async with self._walk(request) as walk:
            found = await walk.find_folder(request.path)
            await self._settings_of(found)  # else it would become one
            await self._change(walk, found, NAMESPACE, text)
            return json_answer(await self._settings_of(found))

    async def remove(self, request: WebRequest) -> WebAnswer:
        """The empty folder is a namespace no more, and is removed."""
        async with self._walk(request) as walk:
            folder, name = await walk.find_parent(request.path)
            found = await walk.step(folder, name)
            await self._settings_of(found)
            walk.check_taking(folder, found)
            caller = walk.caller.make_caller()
            await self.volume.inodes.remove_xattr(found.ino, NAMESPACE, caller)
            try:
                await self.volume.tree.remove_directory(folder.ino, name)
            finally:
                await self.drops.drop([(folder.ino, name)], attributes=[found.ino])
        return WebAnswer(204)

    async def clear(self, request: WebRequest) -> WebAnswer:
        """Remove all that is in a namespace of blocks."""
        async with self._walk(request) as walk:
            found = await walk.find_folder(request.path)
            await self._settings_of(found)
            await self._change(walk, found, CLEAR, b"1")
            await self.drops.drop(attributes=[found.ino])
        return WebAnswer(204)

    async def _change(self, walk: PathWalk, found: FoundPath, name: bytes, value: bytes) -> None:
        """Set an attribute. WebError says why the volume refuses."""
        try:
            await self.volume.inodes.set_xattr(found.ino, name, value, walk.caller.make_caller())
        except errors.InvalidArgument as error:
            raise WebError(400, str(error)) from error

    async def _is_namespace(self, found: FoundPath) -> bool:
        try:
            await self.volume.inodes.get_xattr(found.ino, NAMESPACE)
        except errors.NoAttribute:
            return False
        return True

    async def _settings_of(self, found: FoundPath) -> dict[str, str]:
        """NoAttribute: it is no namespace."""
        try:
            text = (await self.volume.inodes.get_xattr(found.ino, NAMESPACE)).decode()
        except errors.NoAttribute:
            raise errors.NotFound("the folder is no namespace: PUT makes one") from None
        return dict(word.split("=", 1) for word in text.split())


def _words(settings: dict[str, Any]) -> bytes:
    """Settings as the volume takes them. WebError 400."""
    words = []
    for name, value in settings.items():
        if not isinstance(value, str | int | float):
            raise WebError(400, f"{name} is to be text or a number")
        text = str(value).lower() if isinstance(value, bool) else str(value)
        if not name.isidentifier() or any(map(str.isspace, text)):
            raise WebError(400, f"{name!r}: names are words, and values have no spaces")
        words.append(f"{name}={text}")
    return " ".join(words).encode("utf-8", "surrogateescape")
