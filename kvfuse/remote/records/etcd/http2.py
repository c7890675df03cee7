"""gRPC over HTTP/2: one connection to a member, for one call at a time.

A connection that is free serves the next call, and calls side by side have connections of their own. So nothing runs
beside the calls: whoever waits for an answer reads for himself, and what happens to one call happens to no other.

* Requests go out with headers that are never put into a table, and the table of the answers' headers has size 0: a
  block of headers means the same each time, and is decoded once.
* Windows for what the member sends are as large as they can be: a caller that does not read is held back by TCP.
* Reading may be cancelled at any time, sending not: a connection in the middle of a message is of no use.
"""

from __future__ import annotations

import ssl
from collections import deque
from typing import Final
from urllib.parse import unquote

import trio
from hpack import Decoder, HPACKError

READ_SIZE: Final = 1 << 18
FRAME_SIZE_MAX: Final = 1 << 14
"""bytes of a frame that any peer takes"""
RECEIVED_FRAME_SIZE_MAX: Final = 1 << 20
MESSAGE_SIZE_MAX: Final = 256 << 20
"""bytes of one message: far more than etcd puts into one"""
WINDOW: Final = 1 << 30
"""bytes that the peer may send before it is told that they were taken"""
FIRST_WINDOW: Final = 65535
STREAM_ID_MAX: Final = (1 << 31) - 1

# Kinds of frames, flags, and settings: RFC 9113.
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM, ACK, END_HEADERS, PADDED, PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20
HEADER_TABLE_SIZE, ENABLE_PUSH, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE = 1, 2, 4, 5


class Http2Error(Exception):
    """The connection, or what the peer says, is of no use. ``sent``: the peer may have seen the call."""

    def __init__(self, reason: str, *, sent: bool = True) -> None:
        super().__init__(reason)
        self.sent = sent


def _frame(kind: int, flags: int, stream_id: int, payload: bytes | bytearray = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream_id.to_bytes(4, "big") + payload


def _settings(values: dict[int, int]) -> bytes:
    payload = b"".join(name.to_bytes(2, "big") + value.to_bytes(4, "big") for name, value in values.items())
    return _frame(SETTINGS, 0, 0, payload)


PREFACE: Final = (
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    + _settings(
        {
            HEADER_TABLE_SIZE: 0,
            ENABLE_PUSH: 0,
            INITIAL_WINDOW_SIZE: WINDOW,
            MAX_FRAME_SIZE: RECEIVED_FRAME_SIZE_MAX,
        }
    )
    + _frame(WINDOW_UPDATE, 0, 0, (WINDOW - FIRST_WINDOW).to_bytes(4, "big"))
)


def request_headers(path: str, authority: str, *, secure: bool, more: dict[str, str]) -> bytes:
    """The block of headers of a call, as RFC 7541 has it: literals that are never indexed, texts as they are."""
    scheme, authority_field, path_field, content_type_field = (7 if secure else 6), 1, 4, 31
    block = bytes((0x80 | 3, 0x80 | scheme))  # POST
    block += b"\x04" + _text(path) + b"\x01" + _text(authority)
    block += b"\x0f" + bytes((content_type_field - 15,)) + _text("application/grpc")
    assert (authority_field, path_field) == (1, 4)
    return block + b"".join(b"\0" + _text(name) + _text(value) for name, value in {"te": "trailers", **more}.items())


def _text(text: str) -> bytes:
    data = text.encode()
    if len(data) < 127:
        return bytes((len(data),)) + data
    size, left = b"\x7f", len(data) - 127
    while left > 127:
        size += bytes((left & 127 | 128,))
        left >>= 7
    return size + bytes((left,)) + data


class Http2Connection:
    """Made by ``connect``."""

    def __init__(self, stream: trio.SocketStream | trio.SSLStream[trio.SocketStream]) -> None:
        self.messages: deque[bytes] = deque()
        """of the call, which nobody has taken yet"""
        self.outcome: tuple[int, str] | None = None
        """the status of the call, of gRPC, and its message; it has ended"""
        self.call_count = 0
        self.freed_at = 0.0
        self._stream = stream
        self._stream_id = -1
        self._control = bytearray(PREFACE)
        """frames to be sent before all else"""
        self._outgoing = bytearray()
        """of the call's messages, what is not in frames yet"""
        self._ends = False
        """after that, the call has no more messages"""
        self._window = FIRST_WINDOW
        """bytes that may be sent; of the call:"""
        self._call_window = 0
        self._first_call_window = FIRST_WINDOW
        self._received_size = 0
        """bytes for which the peer was not given more window"""
        self._unread = bytearray()
        self._data = bytearray()
        self._block = bytearray()
        """headers that are not complete"""
        self._block_ends = False
        self._decoder = Decoder()
        self._decoded: dict[bytes, dict[bytes, bytes]] = {}
        self._has_headers = False
        self._leaving = False
        """the peer takes no more calls"""

    @property
    def is_free(self) -> bool:
        """It can serve another call."""
        done = self.outcome is not None and not self._outgoing and self._ends
        return done and not self._leaving and self._stream_id < STREAM_ID_MAX - 2

    @property
    def wants_to_send(self) -> bool:
        """`flush` would send something."""
        return bool(self._control or (self._outgoing and self._window > 0 < self._call_window))

    def start(self, headers: bytes) -> None:
        """Begin a call; ``headers`` are of `request_headers`. Nothing is sent before `flush`."""
        self.call_count += 1
        self._stream_id += 2
        self.outcome = None
        self.messages.clear()
        self._data.clear()
        self._has_headers = False
        self._call_window = self._first_call_window
        self._control += _frame(HEADERS, END_HEADERS, self._stream_id, headers)
        self._outgoing.clear()
        self._ends = False

    def write(self, message: bytes) -> None:
        """Add a message to the call."""
        assert not self._ends
        self._outgoing += b"\0" + len(message).to_bytes(4, "big") + message

    async def flush(self) -> None:
        """Send what the peer has room for. Http2Error. The connection is of no use after a cancellation."""
        self._make_frames()
        data = bytes(self._control)
        self._control.clear()
        if data:
            try:
                await self._stream.send_all(data)
            except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                raise Http2Error(reason(error)) from error

    async def call(self, headers: bytes, message: bytes) -> None:
        """A call of one message, to its end: ``messages`` and ``outcome`` say what came of it. Http2Error."""
        self.start(headers)
        self.write(message)
        self._ends = True
        while self.outcome is None:
            if self.wants_to_send:
                await self.flush()
            await self.read()

    async def read(self) -> None:
        """Take in what has come, at least one byte. Http2Error. May be cancelled."""
        try:
            received = await self._stream.receive_some(READ_SIZE)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise Http2Error(reason(error)) from error
        if not received:
            raise Http2Error("the connection was closed")
        self._unread += received
        unread = self._unread
        start, end = 0, len(unread)
        while end - start >= 9:
            size = int.from_bytes(unread[start : start + 3], "big")
            if size > RECEIVED_FRAME_SIZE_MAX:
                raise Http2Error(f"not HTTP/2: {bytes(unread[start : start + 40])!r}")
            stop = start + 9 + size
            if stop > end:
                break
            stream_id = int.from_bytes(unread[start + 5 : start + 9], "big") & STREAM_ID_MAX
            self._take(unread[start + 3], unread[start + 4], stream_id, unread[start + 9 : stop])
            start = stop
        del unread[:start]

    def close(self) -> None:
        """At once; the peer is told nothing."""
        stream = self._stream.transport_stream if isinstance(self._stream, trio.SSLStream) else self._stream
        stream.socket.close()

    # -- frames ---------------------------------------------------------------------------------------

    def _make_frames(self) -> None:
        outgoing = self._outgoing
        sent = 0
        while sent < len(outgoing):
            size = min(len(outgoing) - sent, FRAME_SIZE_MAX, self._window, self._call_window)
            if size <= 0:
                break
            ends = self._ends and sent + size == len(outgoing)
            self._control += _frame(DATA, END_STREAM if ends else 0, self._stream_id, outgoing[sent : sent + size])
            self._window -= size
            self._call_window -= size
            sent += size
        del outgoing[:sent]

    def _take(self, kind: int, flags: int, stream_id: int, payload: bytearray) -> None:
        ours = stream_id == self._stream_id and self.outcome is None
        if kind == DATA:
            self._received(len(payload), stream_id, ours=ours)
            if ours:
                self._data += _unpadded(payload, flags)
                self._split()
                if flags & END_STREAM:
                    raise Http2Error("an answer without a status")
        elif kind in (HEADERS, CONTINUATION):
            self._take_headers(kind, flags, payload, ours=ours)
        elif kind == SETTINGS:
            if not flags & ACK:
                self._take_settings(payload)
        elif kind == PING:
            if not flags & ACK:
                self._control += _frame(PING, ACK, 0, payload)
        elif kind == WINDOW_UPDATE:
            size = int.from_bytes(payload, "big") & STREAM_ID_MAX
            if not stream_id:
                self._window += size
            elif ours:
                self._call_window += size
        elif kind == GOAWAY:
            self._leaving = True
            if self.outcome is None and int.from_bytes(payload[:4], "big") & STREAM_ID_MAX < self._stream_id:
                raise Http2Error("the member takes no more calls", sent=False)
        elif kind == RST_STREAM and ours:
            refused = payload == b"\0\0\0\7"
            raise Http2Error(f"the call was reset (code {int.from_bytes(payload, 'big')})", sent=not refused)

    def _received(self, size: int, stream_id: int, *, ours: bool) -> None:
        """Give the peer new window now and then."""
        self._received_size += size
        if self._received_size < WINDOW // 2:
            return
        update = self._received_size.to_bytes(4, "big")
        self._control += _frame(WINDOW_UPDATE, 0, 0, update)
        if ours:  # as much, at the least, as it was sent: one call at a time has it all
            self._control += _frame(WINDOW_UPDATE, 0, stream_id, update)
        self._received_size = 0

    def _split(self) -> None:
        """Messages from the data."""
        data = self._data
        start = 0
        while len(data) - start >= 5:
            size = int.from_bytes(data[start + 1 : start + 5], "big")
            if data[start] or size > MESSAGE_SIZE_MAX:
                raise Http2Error(f"not a message of gRPC: {bytes(data[start : start + 20])!r}")
            if len(data) - start < 5 + size:
                break
            self.messages.append(bytes(data[start + 5 : start + 5 + size]))
            start += 5 + size
        del data[:start]

    def _take_headers(self, kind: int, flags: int, payload: bytearray, *, ours: bool) -> None:
        if kind == HEADERS:
            payload = _unpadded(payload, flags)[5 if flags & PRIORITY else 0 :]
            self._block_ends = bool(flags & END_STREAM)
        self._block += payload
        if not flags & END_HEADERS:
            return
        headers = self._decode(bytes(self._block))
        self._block.clear()
        if not ours:
            return
        if not self._has_headers:
            status = headers.get(b":status", b"")
            if status != b"200":
                raise Http2Error(f"not an answer of etcd's: status {status.decode(errors='replace')}")
            self._has_headers = True
        if self._block_ends:
            code = headers.get(b"grpc-status", b"")
            if not code.isdigit():
                raise Http2Error("not an answer of etcd's: no status of gRPC")
            self.outcome = int(code), unquote(headers.get(b"grpc-message", b"").decode(errors="replace"))

    def _decode(self, block: bytes) -> dict[bytes, bytes]:
        """Blocks do not depend on each other: the table between them has no room."""
        headers = self._decoded.get(block)
        if headers is None:
            try:
                headers = {bytes(name): bytes(value) for name, value in self._decoder.decode(block, raw=True)}
            except HPACKError as error:
                raise Http2Error(f"headers that cannot be read: {error}") from error
            if len(self._decoded) < 64 and not self._decoder.header_table.dynamic_entries:
                self._decoded[block] = headers
        return headers

    def _take_settings(self, payload: bytearray) -> None:
        for start in range(0, len(payload) - 5, 6):
            if int.from_bytes(payload[start : start + 2], "big") == INITIAL_WINDOW_SIZE:
                size = int.from_bytes(payload[start + 2 : start + 6], "big")
                self._call_window += size - self._first_call_window
                self._first_call_window = size
        self._control += _frame(SETTINGS, ACK, 0)


async def connect(host: str, port: int, tls: ssl.SSLContext | None) -> Http2Connection:
    """Http2Error, with ``sent`` false. Leaves nothing open where it fails or is cancelled."""
    try:
        stream = await trio.open_tcp_stream(host, port)
    except OSError as error:
        raise Http2Error(reason(error), sent=False) from error
    if tls is None:
        return Http2Connection(stream)
    secured = trio.SSLStream(stream, tls, server_hostname=host, https_compatible=True)
    try:
        await secured.do_handshake()
    except trio.BrokenResourceError as error:
        stream.socket.close()
        raise Http2Error(reason(error), sent=False) from error
    except BaseException:
        stream.socket.close()
        raise
    return Http2Connection(secured)


def reason(error: BaseException) -> str:
    """The first cause: errors of trio often say nothing themselves."""
    while True:
        if isinstance(error, BaseExceptionGroup):
            cause: BaseException | None = error.exceptions[0]
        else:
            cause = error.__cause__ or error.__context__
        if cause is None:
            return repr(error)
        error = cause


def _unpadded(payload: bytearray, flags: int) -> bytearray:
    return payload[1 : len(payload) - payload[0]] if flags & PADDED else payload
