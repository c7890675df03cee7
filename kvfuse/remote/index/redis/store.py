"""The index in a Redis server: one string for each entry.

* A find sends MGET, a put or drop a script for the server; the commands of a call go over one connection, without
  waiting for answers in between. Each has up to `KEYS_MAX` keys: the server does nothing else meanwhile.
* A connection that broke, or whose call was late or cancelled, is closed. The server may have closed an idle
  connection: a call over such a one is made again over another. So a call may be done twice.
* A server that restarted without its data, or that evicts keys, has lost entries. Scripts are sent again.
"""

from __future__ import annotations

import hashlib
import re
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import urlsplit

import hiredis
import trio

from kvfuse.errors import ConfigError, EngineError, EngineFull, EngineTimeout
from kvfuse.options.options import RedisIndexOptions
from kvfuse.remote.index.engine import IndexEngine, Row, RowChange, below

KEYS_MAX = 500
"""of one command; Lua takes some thousand arguments"""
SCANNED = 1000
"""keys of the server that it looks at for one answer, about"""
CONNECTIONS_MAX = 8
PORT = 6379
RECEIVED_MAX = 1 << 18
"""bytes taken in at once"""

# Sequences are compared as two numbers of 32 bits: Lua's own are exact up to 53 bits. It compares strings by locale.
PUT = b"""
local had, set = redis.call('MGET', unpack(KEYS)), {}
for i, key in ipairs(KEYS) do
  local high, low = struct.unpack('>I4I4', ARGV[i])
  local had_high, had_low = 0, 0
  if had[i] and #had[i] >= 8 then had_high, had_low = struct.unpack('>I4I4', had[i]) end
  if had_high < high or (had_high == high and had_low <= low) then
    set[#set + 1] = key
    set[#set + 1] = ARGV[i]
  end
end
if #set > 0 then redis.call('MSET', unpack(set)) end
return had
"""
REPLACE = b"""
local had, set = redis.call('MGET', unpack(KEYS)), {}
for i, key in ipairs(KEYS) do
  if had[i] and string.sub(had[i], 1, 8) == string.sub(ARGV[i], 1, 8) then
    set[#set + 1] = key
    set[#set + 1] = string.sub(ARGV[i], 9)
  end
end
if #set > 0 then redis.call('MSET', unpack(set)) end
return had
"""
DROP = b"""
local had, gone = redis.call('MGET', unpack(KEYS)), {}
for i, key in ipairs(KEYS) do
  if had[i] and string.sub(had[i], 1, 8) == ARGV[i] then gone[#gone + 1] = key end
end
if #gone > 0 then redis.call('UNLINK', unpack(gone)) end
return had
"""
BROKEN = (trio.BrokenResourceError, trio.ClosedResourceError, OSError, hiredis.ProtocolError)

UNFINISHED = object()

Command = tuple[bytes | int, ...]


@dataclass(frozen=True)
class RedisPlace:
    """The keys of one index in a server, and how to reach it."""

    options: RedisIndexOptions
    prefix: bytes
    password: str = field(default="", repr=False)


class _Connection:
    """For one call at a time."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self.stream = stream
        self._reader = hiredis.Reader(notEnoughData=UNFINISHED)

    async def ask(self, commands: Sequence[Command]) -> list[Any]:
        """A reply for each, which may be a ReplyError. One of `BROKEN` where the server does not give them."""
        # It packs tuples of any length; its types say so of none with bytes and numbers.
        packed: list[bytes] = [hiredis.pack_command(command) for command in commands]  # type: ignore[arg-type]
        await self.stream.send_all(b"".join(packed))
        replies: list[Any] = []
        while len(replies) < len(commands):
            data = await self.stream.receive_some(RECEIVED_MAX)
            if not data:
                raise trio.BrokenResourceError("the server closed the connection")
            self._reader.feed(bytes(data))
            while (reply := self._reader.gets()) is not UNFINISHED:
                replies.append(reply)
        return replies


class RedisIndex(IndexEngine):
    """Made by ``open``."""

    def __init__(self, place: RedisPlace) -> None:
        super().__init__(f"the index at {place.options.url}")
        self._place = place
        self._options = place.options
        self._url = urlsplit(place.options.url or "")
        self._tls = _tls(place.options) if self._url.scheme == "rediss" else None
        self._idle_connections: list[_Connection] = []
        self._turns = trio.CapacityLimiter(CONNECTIONS_MAX)

    @classmethod
    async def open(cls, place: RedisPlace) -> Self:
        """ConfigError where the options cannot work. It connects at the first call: a volume can be mounted, and goes
        on, without its index."""
        await trio.lowlevel.checkpoint()
        return cls(place)

    async def _find(self, keys: Sequence[bytes]) -> list[bytes | None]:
        prefix = self._place.prefix
        names = [prefix + key for key in keys]
        commands = [(b"MGET", *names[start : start + KEYS_MAX]) for start in range(0, len(names), KEYS_MAX)]
        return [stored for reply in await self._ask(commands) for stored in reply]

    async def _put(self, rows: Sequence[Row]) -> list[bytes | None]:
        return await self._run(PUT, [(row.key, row.stored) for row in rows])

    async def _replace(self, changes: Sequence[RowChange]) -> list[bytes | None]:
        pairs = [(change.row.key, below(change.expected) + change.row.stored) for change in changes]
        return await self._run(REPLACE, pairs)

    async def _drop(self, entries: Sequence[tuple[bytes, int]]) -> list[bytes | None]:
        return await self._run(DROP, [(key, below(sequence)) for key, sequence in entries])

    async def _clear(self) -> None:
        """The server is asked for all its keys, some at a time: it has no order of keys."""
        pattern, cursor = re.sub(rb"([\\*?\[\]])", rb"\\\1", self._place.prefix) + b"*", b"0"
        while True:
            ((cursor, keys),) = await self._ask([(b"SCAN", cursor, b"MATCH", pattern, b"COUNT", SCANNED)])
            if keys:
                await self._ask([(b"UNLINK", *keys)])
            if cursor == b"0":
                return

    async def _run(self, script: bytes, pairs: Sequence[tuple[bytes, bytes]]) -> list[bytes | None]:
        """Run a script for each (key, argument). Returns what the keys had before."""
        calls: list[Command] = []
        for start in range(0, len(pairs), KEYS_MAX):
            some = pairs[start : start + KEYS_MAX]
            keys, arguments = [self._place.prefix + key for key, _ in some], [argument for _, argument in some]
            calls.append((len(some), *keys, *arguments))
        sha = hashlib.sha1(script).hexdigest().encode()
        replies = await self._ask([(b"EVALSHA", sha, *call) for call in calls], script)
        return [stored for reply in replies for stored in reply]

    async def _ask(self, commands: Sequence[Command], script: bytes = b"") -> list[Any]:
        """A reply for each command. EngineError. ``script``: what EVALSHA names."""
        with trio.move_on_after(self._options.deadline):
            async with self._turns:
                replies = await self._exchange(commands)
                unknown = [index for index, reply in enumerate(replies) if _is(reply, "NOSCRIPT")]
                if unknown:
                    whole: list[Command] = [(b"EVAL", script, *commands[index][2:]) for index in unknown]
                    for index, reply in zip(unknown, await self._exchange(whole), strict=True):
                        replies[index] = reply
                self._check(replies)
                return replies
        raise EngineTimeout(f"{self.name} did not answer within {self._options.deadline:g} s")

    async def _exchange(self, commands: Sequence[Command]) -> list[Any]:
        while True:
            was_idle = bool(self._idle_connections)
            connection = self._idle_connections.pop() if was_idle else await self._connect()
            try:
                replies = await connection.ask(commands)
            except BaseException as error:
                await trio.aclose_forcefully(connection.stream)
                if not isinstance(error, BROKEN):
                    raise
                if not was_idle:
                    raise EngineError(f"{self.name}: {_reason(error)}") from error
            else:
                self._idle_connections.append(connection)
                return replies

    async def _connect(self) -> _Connection:
        host, port = self._url.hostname or "", self._url.port or PORT
        try:
            stream: trio.abc.Stream = await trio.open_tcp_stream(host, port)
        except OSError as error:
            raise EngineError(f"{self.name}: {_reason(error)}") from error
        if self._tls is not None:
            stream = trio.SSLStream(stream, self._tls, server_hostname=host, https_compatible=True)
        connection = _Connection(stream)
        try:
            commands = self._greeting()
            if commands:
                self._check(await connection.ask(commands))
        except BaseException as error:
            await trio.aclose_forcefully(stream)
            if isinstance(error, BROKEN):
                raise EngineError(f"{self.name}: {_reason(error)}") from error
            raise
        return connection

    def _greeting(self) -> list[Command]:
        greeting: list[Command] = []
        if self._place.password:
            user = (self._options.user.encode(),) if self._options.user else ()
            greeting.append((b"AUTH", *user, self._place.password.encode()))
        if number := self._url.path.strip("/"):
            greeting.append((b"SELECT", number.encode()))
        return greeting

    def _check(self, replies: Sequence[Any]) -> None:
        for reply in replies:
            if _is(reply, "OOM"):
                raise EngineFull(f"{self.name}: {reply}: set the server's maxmemory-policy to allkeys-lru")
            if isinstance(reply, hiredis.ReplyError):
                raise EngineError(f"{self.name}: {reply}")

    async def _close(self) -> None:
        for connection in self._idle_connections:
            await trio.aclose_forcefully(connection.stream)


def _is(reply: Any, code: str) -> bool:
    return isinstance(reply, hiredis.ReplyError) and str(reply).startswith(code)


def _reason(error: BaseException) -> str:
    """The first cause says it in words; of several addresses the first one's."""
    while True:
        if isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        elif (cause := error.__cause__ or error.__context__) is not None:
            error = cause
        else:
            return str(error) or repr(error)


def _tls(options: RedisIndexOptions) -> ssl.SSLContext:
    """ConfigError naming the file that cannot be used."""
    try:
        context = ssl.create_default_context(cafile=options.ca_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"TLS to redis: {error}; looked at {options.ca_file}") from error
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT  # as for etcd: what holds on one host shall hold on all
    return context
