"""Reads the file of users that may come over TCP, and finds the user of a bearer token.

The file is TOML::

    [users.alice]
    uid = 1000
    gid = 1000
    groups = [100]
    token = "b1.SALT.HASH"

A token is ``NAME.SECRET``: the name finds the user, the salted hash says whether all of it fits. Uid 0 is root with all
capabilities. The file is read again when it changes: who is not in it any more is nobody from then on.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import tomllib
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import trio

from kvfuse.access.client_process import ClientProcess, Powers
from kvfuse.errors import ConfigError
from kvfuse.options.secret_files import check_private, identity_of
from kvfuse.volume.measures.gates import fits, is_lock, make_lock

log = logging.getLogger(__name__)

KEY = "http.users"
FILE_SIZE_MAX = 4 << 20
USERS_MAX = 10_000
KNOWN_MAX = 1024
"""tokens that were found to fit, which are not hashed again"""
LOOK_SECONDS = 1.0
"""between two looks at the file"""
SECRET_SIZE = 32
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_NOBODY_LOCK = make_lock("nobody has this token", bytes(16))
_Id = Annotated[int, msgspec.Meta(ge=0, lt=(1 << 32) - 1)]


class _User(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    uid: _Id
    gid: _Id
    token: str
    groups: tuple[_Id, ...] = ()


class _UsersFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    users: dict[str, _User] = {}


class _Known(NamedTuple):
    lock: str
    client: ClientProcess


class HttpUsers:
    """The users of one file. ``find`` is for the event loop alone."""

    def __init__(self, path: Path) -> None:
        """ConfigError where the file cannot be used."""
        self._path = path
        self._seen: object = None
        self._users: dict[str, _Known] = {}
        self._fitting: dict[str, ClientProcess] = {}
        self._take(*_read(path))

    def find(self, token: str) -> ClientProcess | None:
        """The user of a token; None: it is nobody's."""
        if (known := self._fitting.get(token)) is not None:
            return known
        user = self._users.get(token.partition(".")[0])
        if not fits(user.lock if user is not None else _NOBODY_LOCK, token) or user is None:
            return None
        if len(self._fitting) >= KNOWN_MAX:
            self._fitting.clear()
        self._fitting[token] = user.client
        return user.client

    async def follow(self) -> None:
        """Read the file again whenever it changes, until cancelled. One that cannot be used lets nobody in."""
        while True:
            await trio.sleep(LOOK_SECONDS)
            if await trio.to_thread.run_sync(identity_of, self._path, abandon_on_cancel=True) == self._seen:
                continue
            try:
                found = await trio.to_thread.run_sync(_read, self._path, abandon_on_cancel=True)
            except ConfigError as error:
                log.error("nobody is let in over TCP: %s", error)
                found = identity_of(self._path), {}
            self._take(*found)

    def _take(self, seen: object, users: dict[str, _Known]) -> None:
        self._seen, self._users, self._fitting = seen, users, {}


def _read(path: Path) -> tuple[object, dict[str, _Known]]:
    """ConfigError."""
    seen = identity_of(path)
    check_private(path, KEY)
    try:
        with path.open("rb") as file:
            text = file.read(FILE_SIZE_MAX + 1).decode()
        if len(text) > FILE_SIZE_MAX:
            raise ConfigError(f"{KEY}: {path} has more than {FILE_SIZE_MAX} bytes")
        users = msgspec.convert(tomllib.loads(text), _UsersFile).users
    except OSError as error:
        raise ConfigError(f"{KEY}: {path} cannot be read: {error.strerror}") from error
    except (ValueError, msgspec.ValidationError) as error:
        raise ConfigError(f"{KEY}: {path}: {error}") from error
    if len(users) > USERS_MAX:
        raise ConfigError(f"{KEY}: {path} has more than {USERS_MAX} users")
    for name, user in users.items():
        if not _NAME.fullmatch(name):
            raise ConfigError(f"{KEY}: {path}: {name!r}: names of users have 1 to 64 letters, digits, '-' and '_'")
        if not is_lock(user.token):
            raise ConfigError(
                f"{KEY}: {path}: the token of {name!r} is no hash: 'kvfuse serve-http --new-token {name}' makes one"
            )
    return seen, {
        name: _Known(user.token, make_client(user.uid, user.gid, user.groups)) for name, user in users.items()
    }


def make_client(uid: int, gid: int, groups: tuple[int, ...] = ()) -> ClientProcess:
    """A caller that is no process of this host. Uid 0 is root with all capabilities."""
    return ClientProcess(0, uid, gid, frozenset(groups), Powers(-1, True) if uid == 0 else Powers())


def make_token(name: str) -> tuple[str, str]:
    """(a new token, lines of the file for a user with it). ConfigError."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r}: names of users have 1 to 64 letters, digits, '-' and '_'")
    token = f"{name}.{secrets.token_urlsafe(SECRET_SIZE)}"
    uid, gid = os.getuid(), os.getgid()
    return token, f'[users.{name}]\nuid = {uid}\ngid = {gid}\ngroups = []\ntoken = "{make_lock(token)}"\n'
