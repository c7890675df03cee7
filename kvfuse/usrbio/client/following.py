"""Following the blocks of a folder: which are there, and then each that is stored or removed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple

from kvfuse.usrbio.client.files import register_folder
from kvfuse.usrbio.client.session import Session, find_mount
from kvfuse.usrbio.client.tokens import Token, find_tokens
from kvfuse.usrbio.protocol.wire import NEWS, NEWS_SIZE_MAX, NewsKind, Request, unpack_keys


class News(NamedTuple):
    """What one message says."""

    kind: NewsKind
    names: list[bytes]
    """file names of blocks; `key_of` has their keys"""


class Follower(AbstractContextManager["Follower"]):
    """A connection of its own, on which the daemon tells what becomes of the blocks of a folder in a cache.

    Iterate over it: PRESENT with all blocks, in parts and with changes in between, then READY, then STORED, REMOVED
    and CLEARED (all are gone) as it happens on this host. It ends with Disconnected, also when the iteration is so slow
    that news were lost: then follow again, from PRESENT on.
    """

    def __init__(self, folder: str | os.PathLike[str], *, deadline: float = 10.0, token: Token = None) -> None:
        """``deadline``: seconds in which the daemon has to answer. ``token``: as of `connect`.

        PermissionError where the caller may not list the folder, OSError EINVAL where it is in no cache,
        FileNotFoundError: there is none, or it has another token; Disconnected."""
        self._session = Session(find_mount(folder), deadline, find_tokens(token))
        try:
            reply = register_folder(self._session, os.fspath(folder), 0)
            self._session.request(Request.FOLLOW, reply.values[0])
        except BaseException:
            self._session.close()
            raise

    def __iter__(self) -> Iterator[News]:
        while True:
            data = self._session.next_message(NEWS_SIZE_MAX)
            try:
                kind, count = NEWS.unpack_from(data)
                news = News(NewsKind(kind), unpack_keys(data[NEWS.size :], count))
            except Exception as error:
                raise self._session.broken(f"a message of {len(data)} bytes that is no news") from error
            yield news

    def close(self) -> None:
        """Ends an iteration in another thread, too, with Disconnected."""
        self._session.close()

    def __exit__(self, *_: object) -> None:
        self.close()
