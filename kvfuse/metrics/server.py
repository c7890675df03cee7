"""Answers ``GET /metrics`` over HTTP, beside the mount: one answer a connection, a few connections at a time.

A client has a deadline for its whole exchange, so one that is slow, or says nothing, takes a place for a few seconds.
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

from kvfuse.errors import MountError
from kvfuse.metrics.families import families
from kvfuse.options.options import MetricsOptions
from kvfuse.volume.api import Space

log = logging.getLogger(__name__)

PATH = "/metrics"
OPEN_METRICS = "application/openmetrics-text; version=1.0.0"
CLIENT_SECONDS = 5.0
"""for one client, from its connection to the end of the answer"""
CLIENTS_MAX = 8
"""clients that are answered at the same time; others are turned away"""
REQUEST_SIZE_MAX = 16 << 10
RECEIVE_SIZE = 4096


class Source(Protocol):
    """A mounted volume, as far as it is asked here."""

    def stats(self) -> dict[str, Any]: ...
    def space(self) -> Space: ...


class Answer(NamedTuple):
    """A status and a body."""

    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"

    @property
    def headers(self) -> list[tuple[str, str]]:
        found = [("Content-Type", self.content_type), ("Content-Length", str(len(self.body))), ("Connection", "close")]
        return [*found, ("Allow", "GET")] if self.status == 405 else found


async def serve_metrics(
    volume: Source, *, options: MetricsOptions, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
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

    def __init__(self, volume: Source) -> None:
        self._volume = volume
        self._process = ProcessCollector(registry=None)
        self._encoders = trio.CapacityLimiter(1)
        self._client_count = 0

    async def serve(self, stream: trio.SocketStream) -> None:
        """Answer one client."""
        self._client_count += 1
        try:
            async with stream:
                if self._client_count > CLIENTS_MAX:
                    return
                with trio.move_on_after(CLIENT_SECONDS):
                    await self._answer(stream)
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # the client has gone
        finally:
            self._client_count -= 1

    async def _answer(self, stream: trio.SocketStream) -> None:
        connection = h11.Connection(h11.SERVER, REQUEST_SIZE_MAX)
        try:
            request = await _receive(stream, connection)
            if request is None:
                return
            answer = await self._respond(request)
        except h11.RemoteProtocolError as error:
            answer = Answer(error.error_status_hint, b"not an HTTP request\n")
        except Exception:  # whatever is wrong with a figure, it may not end the mount
            log.exception("a request for metrics failed")
            answer = Answer(500, b"the daemon's log has the reason\n")
        if connection.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return
        head = connection.send(h11.Response(status_code=answer.status, headers=answer.headers))
        await stream.send_all((head or b"") + (connection.send(h11.Data(answer.body)) or b""))
        connection.send(h11.EndOfMessage())

    async def _respond(self, request: h11.Request) -> Answer:
        if request.target.partition(b"?")[0] != PATH.encode():
            return Answer(404, f"there is only {PATH}\n".encode())
        if request.method != b"GET":
            return Answer(405, b"only GET\n")
        accepted = b",".join(value for name, value in request.headers if name == b"accept").decode("latin-1")
        found = _Collected(self._volume.stats(), self._volume.space()._asdict(), self._process)
        return await trio.to_thread.run_sync(_encode, found, accepted, limiter=self._encoders)


@dataclass
class _Collected(Collector):
    """What one answer is made of."""

    stats: Mapping[str, Any]
    space: Mapping[str, Any]
    process: Collector

    def collect(self) -> Iterator[Metric]:
        yield from families(self.stats, self.space)
        yield from self.process.collect()


def _encode(collected: _Collected, accepted: str) -> Answer:
    """As OpenMetrics, or else in the format that everybody takes."""
    encode, content_type = choose_encoder(OPEN_METRICS if OPEN_METRICS.partition(";")[0] in accepted else "")
    return Answer(200, encode(collected), content_type)


async def _receive(stream: trio.SocketStream, connection: h11.Connection) -> h11.Request | None:
    """The head of a request; None where the client says nothing more. Its body is not read."""
    while True:
        event = connection.next_event()
        if isinstance(event, h11.Request):
            return event
        if event is not h11.NEED_DATA:
            return None
        connection.receive_data(await stream.receive_some(RECEIVE_SIZE))
