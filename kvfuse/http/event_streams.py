"""Streams of what happens to the blocks of a folder: as lines of JSON, or as server-sent events.

First "present" for all that are there, then "ready", then "stored", "removed" and "cleared" as they happen. "lost" ends
a stream whose client took events too slowly, and "ended" one whose client may not follow the folder any more. "alive",
now and then, shows that somebody is there.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncGenerator
from contextlib import ExitStack
from dataclasses import dataclass

import trio

from kvfuse import errors
from kvfuse.access.block_follower import BlockFollower, FollowedNames, take_changes
from kvfuse.access.namespace_access import NamespaceAccess
from kvfuse.access.namespace_handle import NO_GROUP, NamespaceHandle
from kvfuse.http.path_walk import PathWalk
from kvfuse.http.web_limits import SharedUnits
from kvfuse.http.web_message import Streamed, WebAnswer, WebRequest
from kvfuse.keys import key_of
from kvfuse.volume.api import RingApi
from kvfuse.volume.views.news import PackedNames, Watch

EVENTS = "text/event-stream"
LINES = "application/x-ndjson"
NAMES_AT_ONCE = 256
"""names of one event"""
LOOK_SECONDS = 1.0
"""until a stream sees that the door closes"""
ALIVE_LOOKS = 15
"""looks without an event, after which "alive" is sent"""


@dataclass
class EventStreams:
    """The handler. ``followers``: streams of one user."""

    volume: RingApi
    followers: SharedUnits
    is_ending: bool = False

    async def follow(self, request: WebRequest) -> WebAnswer:
        """What happens to the blocks of a folder, until the client leaves."""
        admission = NamespaceAccess(self.volume, request.caller)
        for token in request.tokens:
            admission.add_token(token)
        async with PathWalk(self.volume, request.caller, request.tokens) as walk:
            folder = await walk.find_folder(request.path)
            has_token = await admission.check_access(folder.ino)
        namespace = NamespaceHandle(folder.ino, 0, NO_GROUP, by_path=not has_token)
        follower = BlockFollower(self.volume, admission, namespace)
        await follower.check()
        as_events = EVENTS in request.headers.get("accept", "")
        held = ExitStack()
        held.enter_context(self.followers.taking(request.caller.uid))
        watch = held.enter_context(self.volume.blocks.watching(folder.ino))

        async def release() -> None:
            held.close()

        body = Streamed(self._tell(follower, watch, as_events=as_events), None, release)
        return WebAnswer(200, body, EVENTS if as_events else LINES, (("Cache-Control", "no-store"),))

    async def _tell(self, follower: BlockFollower, watch: Watch, *, as_events: bool) -> AsyncGenerator[bytes, None]:
        try:
            async for told in follower.tell_present(watch, NAMES_AT_ONCE):
                yield _encode(told.kind.name.lower(), _names_of(told), as_events=as_events)
            looks = 0
            while not self.is_ending:
                with trio.move_on_after(LOOK_SECONDS) as scope:
                    await watch.wait()
                await follower.check()
                if watch.lost.is_set():
                    yield _encode("lost", [], as_events=as_events)
                    return
                looks = looks + 1 if scope.cancelled_caught else 0
                if looks >= ALIVE_LOOKS:
                    looks = 0
                    yield _encode("alive", [], as_events=as_events)
                for told in take_changes(watch, NAMES_AT_ONCE):
                    yield _encode(told.kind.name.lower(), _names_of(told), as_events=as_events)
        except errors.KvfuseError:  # the client lost its right, or the folder is gone
            yield _encode("ended", [], as_events=as_events)


def _names_of(told: FollowedNames) -> list[str]:
    """Keys of the blocks, or names of their files where the key is not known."""
    names = _unpack(told.packed) if told.packed is not None else told.names
    return [os.fsdecode(key_of(name) or name) for name in names]


def _unpack(packed: PackedNames) -> list[bytes]:
    start, names = 2 * packed.name_count, list[bytes]()
    for number in range(packed.name_count):
        end = start + int.from_bytes(packed.packed[2 * number : 2 * number + 2], "little")
        names.append(packed.packed[start:end])
        start = end
    return names


def _encode(event: str, names: list[str], *, as_events: bool) -> bytes:
    content = {"event": event} | ({"keys": names} if names else {})
    if as_events:
        return f"event: {event}\ndata: {json.dumps(content)}\n\n".encode()
    return json.dumps(content).encode() + b"\n"
