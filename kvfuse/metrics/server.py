"""Answers ``GET /metrics`` over HTTP, beside the mount: one answer a connection, a few connections at a time.

A client has a deadline for its request, and one for its whole exchange; slow ones keep nobody out (`ConnectionLimit`).
The volume is asked in the event loop, which takes a fraction of a millisecond; the text is made of that in a thread.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import h11
import trio
from prometheus_client import Metric, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from kvfuse.connection_limit import ConnectionLimit, HttpClient
from kvfuse.errors import MountError
from kvfuse.metrics.families import families
from kvfuse.options.options import MetricsOptions
from kvfuse.volume.api import Statfs

log = logging.getLogger(__name__)

PATH = "/metrics"
OPEN_METRICS = "application/openmetrics-text; version=1.0.0"
CLIENT_SECONDS = 5.0
"""for one client, from its connection to its end"""
REQUEST_SECONDS = 2.0
"""for its request, from the connection to the end of the head"""
CLIENTS_MAX = 16
"""connections that are open at the same time; see `ConnectionLimit` for the next one"""
REQUEST_SIZE_MAX = 16 << 10
RECEIVE_SIZE = 4096
DRAINED_SIZE_MAX = 64 << 10


class MeteredVolume(Protocol):
    """A mounted volume, as far as it is asked here."""

    def stats(self) -> dict[str, Any]: ...
    def space(self) -> Statfs: ...


class HttpAnswer(NamedTuple):
    """A status and a body."""

    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"

    @property
    def headers(self) -> list[tuple[str, str]]:
        found = [("Content-Type", self.content_type), ("Content-Length", str(len(self.body))), ("Connection", "close")]
        return [*found, ("Allow", "GET, HEAD")] if self.status == 405 else found


BUSY = HttpAnswer(503, b"too many requests are being answered\n")
TOO_SLOW = HttpAnswer(408, b"the request was not complete in time\n")


async def serve_metrics(
    volume: MeteredVolume, *, options: MetricsOptions, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Answer at ``options.listen`` until cancelled. MountError where nobody can listen there."""
    assert options.listen is not None
    host, _, port = options.listen.rpartition(":")
    try:
        listeners = await trio.open_tcp_listeners(int(port), host=host.strip("[]"))
    except OSError as error:
        raise MountError(f"metrics.listen: nobody can listen at {options.listen}: {error.strerror or error}") from error
    log.info("metrics are at http://%s%s", options.listen, PATH)
    task_status.started()
    await trio.serve_listeners(_Door(volume).serve, listeners)


class _Door:
    """The clients of one volume."""

    def __init__(self, volume: MeteredVolume) -> None:
        self._volume = volume
        self._process = ProcessCollector(registry=None)
        self._encoders = trio.CapacityLimiter(1)
        self._limit = ConnectionLimit(CLIENTS_MAX)

    async def serve(self, stream: trio.SocketStream) -> None:
        """Answer one client. Nothing that goes wrong with it is raised: that would end the listeners."""
        try:
            async with stream:
                with trio.move_on_after(CLIENT_SECONDS) as scope:
                    await self._serve(stream, HttpClient(stream.socket.getpeername()[0], scope.cancel))
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # the client has gone
        except Exception:
            log.exception("a request for metrics failed")

    async def _serve(self, stream: trio.SocketStream, client: HttpClient) -> None:
        exchange = _Exchange(stream)
        if not self._limit.enter(client):
            await exchange.send(BUSY)
            return
        try:
            answer = await self._answer(exchange, client)
            if answer is not None:
                await exchange.send(answer)
                client.waits_for_us = False
                await exchange.drain()
        finally:
            self._limit.leave(client)

    async def _answer(self, exchange: _Exchange, client: HttpClient) -> HttpAnswer | None:
        """Read a request and make its answer; None where the client says nothing more."""
        try:
            with trio.move_on_after(REQUEST_SECONDS) as scope:
                await exchange.receive()
            if scope.cancelled_caught:
                return TOO_SLOW
            if exchange.request is None:
                return None
            client.waits_for_us = True
            return await self._respond(exchange.request)
        except h11.RemoteProtocolError as error:
            return HttpAnswer(error.error_status_hint, b"not an HTTP request\n")
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
            raise
        except Exception:  # whatever is wrong with a figure
            log.exception("a request for metrics failed")
            return HttpAnswer(500, b"the daemon's log has the reason\n")

    async def _respond(self, request: h11.Request) -> HttpAnswer:
        if request.target.partition(b"?")[0] != PATH.encode():
            return HttpAnswer(404, f"there is only {PATH}\n".encode())
        if request.method not in (b"GET", b"HEAD"):
            return HttpAnswer(405, b"only GET and HEAD\n")
        accepted = b",".join(value for name, value in request.headers if name == b"accept").decode("latin-1")
        found = _Collected(self._volume.stats(), self._volume.space()._asdict(), self._process)
        return await trio.to_thread.run_sync(_encode, found, accepted, limiter=self._encoders)


class _Exchange:
    """One request of a connection, and its answer."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._http = h11.Connection(h11.SERVER, REQUEST_SIZE_MAX)
        self.request: h11.Request | None = None

    async def receive(self) -> None:
        """Read the head of the request, if there is one. Its body is not read. h11.RemoteProtocolError."""
        while (event := self._http.next_event()) is h11.NEED_DATA:
            self._http.receive_data(await self._stream.receive_some(RECEIVE_SIZE))
        if isinstance(event, h11.Request):
            self.request = event

    async def send(self, answer: HttpAnswer) -> None:
        """Send ``answer``, without its body to a HEAD, and then end this direction."""
        if self._http.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return
        data = self._http.send(h11.Response(status_code=answer.status, headers=answer.headers)) or b""
        if self.request is None or self.request.method != b"HEAD":
            data += self._http.send(h11.Data(answer.body)) or b""
        await self._stream.send_all(data)
        await self._stream.send_eof()

    async def drain(self) -> None:
        """Read what the client still sends: the kernel may take the answer back where that is left unread."""
        for _ in range(DRAINED_SIZE_MAX // RECEIVE_SIZE):
            if not await self._stream.receive_some(RECEIVE_SIZE):
                return


@dataclass
class _Collected(Collector):
    """What one answer is made of."""

    stats: Mapping[str, Any]
    space: Mapping[str, Any]
    process: Collector

    def collect(self) -> Iterator[Metric]:
        yield from families(self.stats, self.space)
        yield from self.process.collect()


def _encode(collected: _Collected, accepted: str) -> HttpAnswer:
    """As OpenMetrics, or else in the format that everybody takes."""
    encode, content_type = choose_encoder(OPEN_METRICS if OPEN_METRICS.partition(";")[0] in accepted else "")
    return HttpAnswer(200, encode(collected), content_type)
