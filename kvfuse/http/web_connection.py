"""One connection of a client: reads requests, has them answered, sends answers. h11 knows the protocol.

A request's head has a deadline from its first byte on, bodies in both directions have a `ClientPace`. h11 takes some
requests that a server behind a proxy should not: lines that are folded or end without a carriage return, a length that
is given twice, a length beside an encoding of the transfer. They are refused before it sees them.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import ssl
import struct
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from email.utils import formatdate
from http import HTTPStatus
from typing import Any, Protocol

import h11
import trio

from kvfuse.connection_limit import HttpClient
from kvfuse.http.web_message import Body, Lent, RequestBody, Streamed, WebAnswer, WebError, problem
from kvfuse.http.web_pace import ClientPace, TooSlow

log = logging.getLogger(__name__)

IDLE_SECONDS = 60.0
"""between two requests"""
HEAD_SECONDS = 10.0
"""for the head of a request, from its first byte on; and for a handshake of TLS"""
HEAD_SIZE_MAX = 16 << 10
HEADERS_MAX = 64
REQUESTS_MAX = 100_000
"""of one connection"""
RECEIVE_SIZE = 256 << 10
PIECE = 1 << 20
"""bytes that are sent at once"""
JOINED_MAX = 32 << 10
"""bytes of a body that are copied to go with its head in one call"""
DRAINED_SIZE_MAX = 64 << 20
DRAIN_SECONDS = 2.0
"""what is read, and for how long, of a request whose body nobody wanted, so that its sender reads the answer"""
SMALL_BODY = 256 << 10
"""bytes of such a body after which the connection goes on"""
ABORT = struct.pack("ii", 1, 0)
"""value of SO_LINGER: what is not sent yet never is"""
VERSIONS = b"1.0", b"1.1"
_FOLDED = re.compile(rb"\n[ \t]")
_LENGTH = re.compile(rb"\ncontent-length[ \t]*:", re.IGNORECASE)
_REASONS = {status.value: status.phrase.encode() for status in HTTPStatus}
_HEAD_END = b"\r\n\r\n"

Stream = trio.SocketStream | trio.SSLStream[trio.SocketStream]
GONE = (OSError, ssl.SSLError, trio.BrokenResourceError, trio.ClosedResourceError, trio.EndOfChannel)
"""the client has gone"""


class Answerer(Protocol):
    """Answers requests of one connection."""

    async def answer(self, head: h11.Request, body: RequestBody) -> WebAnswer:
        """Raises nothing but cancellations."""

    def done(self) -> None:
        """The answer was sent, or never will be."""


class WebConnection:
    """Serves requests of one stream, one after the other."""

    def __init__(self, stream: Stream, client: HttpClient, answerer: Answerer) -> None:
        self._stream = stream
        self._socket = stream.socket if isinstance(stream, trio.SocketStream) else None
        self._client = client
        self._answerer = answerer
        self._http = h11.Connection(h11.SERVER, HEAD_SIZE_MAX)
        self._body = _Body(self)
        self._is_ending = False

    def end_soon(self) -> None:
        """Close the connection after the answer that is under way; at once where none is."""
        self._is_ending = True
        if not self._client.waits_for_us:
            self._client.end()

    async def serve(self) -> None:
        """Serve until the client closes the connection, or does what is not allowed."""
        try:
            for _ in range(REQUESTS_MAX):
                request = await self._receive_head()
                if request is None:
                    return
                self._client.waits_for_us = True
                await self._serve_one(request)
                self._client.waits_for_us = False
                if not await self._begin_next():
                    break
        except h11.RemoteProtocolError as error:
            await self._refuse(WebError(error.error_status_hint, f"this is no request of HTTP: {error}"))
        except WebError as error:
            await self._refuse(error)
        except TooSlow:
            if self._socket is not None:
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, ABORT)
            return
        await self._drain()

    async def _serve_one(self, request: h11.Request) -> None:
        self._body = _Body(self, _length_of(request))
        try:
            await self._send(request.method, await self._answerer.answer(request, self._body))
        finally:
            self._answerer.done()

    async def _begin_next(self) -> bool:
        """Make ready for the next request; False: there is to be none."""
        if self._http.their_state is not h11.DONE and self._http.our_state is h11.DONE:
            with suppress(WebError):
                await self._body.skip()
        if self._is_ending or self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
            return False
        self._http.start_next_cycle()
        return True

    # -- the head ------------------------------------------------------------------------------------

    async def _receive_head(self) -> h11.Request | None:
        """The next request; None: there is none. h11.RemoteProtocolError, WebError."""
        deadline = trio.current_time() + IDLE_SECONDS
        has_begun = False
        while (end := (data := self._http.trailing_data[0]).find(_HEAD_END)) < 0:
            if len(data) > HEAD_SIZE_MAX:
                raise WebError(431, f"the head of a request has {HEAD_SIZE_MAX} bytes at most")
            _check_lines(data)
            if data and not has_begun:
                has_begun, deadline = True, trio.current_time() + HEAD_SECONDS
            with trio.move_on_at(deadline) as scope:
                received = await self._stream.receive_some(RECEIVE_SIZE)
            if scope.cancelled_caught:
                if has_begun:
                    raise WebError(408, "the head of the request was not complete in time")
                return None
            if not received:
                return None
            self._http.receive_data(bytes(received))
        if end > HEAD_SIZE_MAX:
            raise WebError(431, f"the head of a request has {HEAD_SIZE_MAX} bytes at most")
        _check_lines(data[: end + 2])
        event = self._http.next_event()
        if not isinstance(event, h11.Request):
            return None
        if event.http_version not in VERSIONS:
            raise WebError(505, "only HTTP/1.1 and HTTP/1.0 are offered")
        if len(event.headers) > HEADERS_MAX:
            raise WebError(431, f"a request has {HEADERS_MAX} headers at most")
        names = [name for name, _ in event.headers]
        if b"transfer-encoding" in names and (b"content-length" in names or event.http_version != b"1.1"):
            raise WebError(400, "a request has either a Content-Length or, in HTTP/1.1, a Transfer-Encoding")
        return event

    # -- bodies of requests --------------------------------------------------------------------------

    async def next_piece(self, pace: ClientPace) -> bytes | None:
        """The next bytes of a request's body; None at its end. WebError 408; BrokenResourceError."""
        if self._http.they_are_waiting_for_100_continue:
            await self._write(self._http.send(h11.InformationalResponse(status_code=100, headers=[])) or b"", pace)
        while (event := self._next_event()) is h11.NEED_DATA:
            try:
                with pace:
                    received = await self._stream.receive_some(RECEIVE_SIZE)
            except TooSlow:
                raise WebError(408, "the body came too slowly", headers={"Connection": "close"}) from None
            pace.moved(len(received))
            self._http.receive_data(bytes(received))
        if isinstance(event, h11.Data):
            return bytes(event.data)
        if isinstance(event, h11.EndOfMessage):
            return None
        raise trio.BrokenResourceError("the client ended amid a body")

    def _next_event(self) -> Any:
        try:
            return self._http.next_event()
        except h11.RemoteProtocolError as error:
            raise WebError(400, f"the body is none of HTTP: {error}", headers={"Connection": "close"}) from error

    # -- answers -------------------------------------------------------------------------------------

    async def _send(self, method: bytes, answer: WebAnswer) -> None:
        """Send an answer. TooSlow; what a body raises ends the connection, as the client cannot be told otherwise."""
        pace, body = ClientPace(), answer.body
        release = body.release if isinstance(body, Streamed) else None
        has_body = method != b"HEAD" and answer.status not in (204, 304)
        try:
            head = self._http.send(self._head_of(answer)) or b""
            if isinstance(body, Streamed) and has_body:
                async with aclosing(body.pieces) as pieces:
                    async for piece in pieces:
                        await self._send_piece(head, piece, pace)
                        head = b""
                if head:
                    await self._write(head, pace)
            elif has_body and isinstance(body, Lent):
                data = self._send_lent(head, body)
                del body, answer  # nobody holds the memory while the client takes its time
                await trio.lowlevel.checkpoint()
                await self._write(data, pace)
            elif has_body and not isinstance(body, Streamed | Lent) and len(body):
                await self._send_piece(head, body, pace)
            else:
                await self._write(head, pace)
            if end := self._http.send(h11.EndOfMessage()):
                await self._write(end, pace)
        finally:
            if release is not None:
                await release()

    def _head_of(self, answer: WebAnswer) -> h11.Response:
        headers = [("Date", date_now()), *answer.headers]
        if answer.content_type is not None:
            headers.append(("Content-Type", answer.content_type))
        size = answer.body.size if isinstance(answer.body, Streamed) else len(answer.body)
        if answer.size is not None or (size is not None and answer.status not in (204, 304)):
            headers.append(("Content-Length", str(size if answer.size is None else answer.size)))
        if self._is_ending or not (self._http.their_state is h11.DONE or self._body.is_small):
            headers.append(("Connection", "close"))
        return h11.Response(status_code=answer.status, headers=headers, reason=_REASONS[answer.status])

    def _send_lent(self, head: bytes, body: Lent) -> bytes:
        """Send what the kernel takes without a wait. The rest, copied."""
        # h11 counts the bytes of whatever has a length, and passes it on: its types say bytes.
        self._http.send_with_data_passthrough(h11.Data(data=body.data))  # type: ignore[arg-type]
        sent = 0
        if self._socket is not None:
            with suppress(BlockingIOError):
                sent = os.writev(self._socket.fileno(), [head, body.data])
        return head[sent:] + bytes(body.data[max(0, sent - len(head)) :])

    async def _send_piece(self, head: bytes, piece: Body, pace: ClientPace) -> None:
        for part in self._http.send_with_data_passthrough(h11.Data(data=piece)) or ():  # type: ignore[arg-type]
            if head and len(part) <= JOINED_MAX:
                head, part = b"", b"".join((head, part))
            await self._write(part, pace, head)
            head = b""

    async def _write(self, data: Body, pace: ClientPace, head: bytes = b"") -> None:
        """Send bytes, after those of ``head``. TooSlow."""
        if head and self._socket is not None:
            with pace:
                sent = await self._socket.sendmsg([head, data])
            head, data = head[sent:], memoryview(data)[max(0, sent - len(head)) :]
        for rest in (memoryview(head), memoryview(data)):
            for start in range(0, len(rest), PIECE):
                part = rest[start : start + PIECE]
                with pace:
                    await self._stream.send_all(part)
                pace.moved(len(part))

    async def _refuse(self, error: WebError) -> None:
        """Say that a request makes no sense, if anything can be said."""
        if self._http.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return
        answer = problem(error)
        assert isinstance(answer.body, bytes)
        headers = [*answer.headers, ("Connection", "close"), ("Content-Length", str(len(answer.body)))]
        headers += [("Content-Type", str(answer.content_type)), ("Date", date_now())]
        head = (
            self._http.send(h11.Response(status_code=answer.status, headers=headers, reason=_REASONS[answer.status]))
            or b""
        )
        with suppress(TooSlow):
            await self._write(head + answer.body, ClientPace())

    async def _drain(self) -> None:
        """End this direction, and read a little of what still comes: else the kernel may take the answer back."""
        with trio.move_on_after(DRAIN_SECONDS):
            if self._socket is not None:
                self._socket.shutdown(trio.socket.SHUT_WR)
            for _ in range(DRAINED_SIZE_MAX // RECEIVE_SIZE + 1):
                if not await self._stream.receive_some(RECEIVE_SIZE):
                    return


class _Body:
    """The body of one request (`RequestBody`)."""

    def __init__(self, connection: WebConnection, size: int | None = 0) -> None:
        self._connection = connection
        self.size = size
        self._is_over = False

    @property
    def is_small(self) -> bool:
        """It is cheaper to read what nobody wants of it than to connect again."""
        return self.size is not None and self.size <= SMALL_BODY

    async def pieces(self) -> AsyncIterator[bytes]:
        pace = ClientPace()
        while not self._is_over:
            piece = await self._connection.next_piece(pace)
            if piece is None:
                self._is_over = True
            else:
                yield piece

    async def read_all(self, size_max: int) -> bytes:
        if self.size is not None and self.size > size_max:
            raise WebError(413, f"the body has {self.size} bytes: {size_max} at most are taken here")
        parts, size = list[bytes](), 0
        async for piece in self.pieces():
            size += len(piece)
            if size > size_max:
                raise WebError(413, f"the body has more than the {size_max} bytes that are taken here")
            parts.append(piece)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def skip(self) -> None:
        """Read the rest of a small body."""
        if self.is_small:
            with trio.move_on_after(DRAIN_SECONDS):
                async for _ in self.pieces():
                    pass


_date = (0, "")


def date_now() -> str:
    """The header Date."""
    global _date
    now = int(time.time())
    if now != _date[0]:
        _date = now, formatdate(now, usegmt=True)
    return _date[1]


def _check_lines(head: bytes) -> None:
    """WebError 400: lines that others may read otherwise than this door."""
    if head.count(b"\n") != head.count(b"\r\n"):
        raise WebError(400, "a line of the head ends without a carriage return")
    if _FOLDED.search(head):
        raise WebError(400, "a header is folded over several lines")
    if len(_LENGTH.findall(head)) > 1:
        raise WebError(400, "the request has two Content-Lengths")


def _length_of(request: h11.Request) -> int | None:
    for name, value in request.headers:
        if name == b"transfer-encoding":
            return None
        if name == b"content-length":
            return int(value)
    return 0
