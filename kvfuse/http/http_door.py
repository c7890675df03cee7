"""The HTTP door of a volume: listens, says who a client is, finds the handler of each request, and bounds all of it.

Clients of TCP show a bearer token of `http_users`, those of a UNIX socket are the users that the kernel says.
"""

from __future__ import annotations

import base64
import errno
import logging
import os
import socket
import ssl
import stat
from contextlib import AsyncExitStack, ExitStack, suppress
from pathlib import Path
from typing import Any

import h11
import trio

from kvfuse import failing
from kvfuse.access.client_process import ClientProcess
from kvfuse.connection_limit import ConnectionLimit, HttpClient
from kvfuse.errnos import errno_of
from kvfuse.errors import MountError
from kvfuse.http.http_certificate import HttpCertificate
from kvfuse.http.http_resources import Resources
from kvfuse.http.http_users import HttpUsers, make_client
from kvfuse.http.routes import Routes, check_parameters
from kvfuse.http.web_connection import GONE, HEAD_SECONDS, Stream, WebConnection
from kvfuse.http.web_limits import SharedUnits
from kvfuse.http.web_message import RequestBody, WebAnswer, WebError, WebRequest, problem, split_target
from kvfuse.http.web_pace import TooSlow
from kvfuse.options.options import HttpOptions
from kvfuse.serving import NUMBERS, SERVED
from kvfuse.volume.api import RingApi

log = logging.getLogger(__name__)

END_SECONDS = 5.0
"""that requests in flight have when the door closes"""
TOKENS_MAX = 16
"""of namespaces, in one request"""
REMEMBERED_MAX = 256
"""rights that one connection remembers"""
BACKLOG = 256
LOCAL_HOSTS = frozenset(("localhost", "127.0.0.1", "[::1]"))
EXPECTED = frozenset({errno.EIO, errno.ETIMEDOUT})
"""errnos of requests whose error the log has, too"""


async def serve_http(
    volume: RingApi, *, options: HttpOptions, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Answer at ``options.listen`` until cancelled; then requests in flight have a moment to end.

    MountError where nobody can listen there, ConfigError where the users' file or the certificate cannot be used.
    """
    assert options.listen is not None
    users, certificate = open_files(options)
    door = HttpDoor(volume, options, users)
    async with AsyncExitStack() as stack:
        listeners = await _listen(options.listen, stack)
        volume.sections["http"] = door.statistics
        async with trio.open_nursery() as nursery:
            if users is not None:
                nursery.start_soon(failing.service, "users of HTTP", users.follow)
            if certificate is not None:
                nursery.start_soon(failing.service, "certificate of HTTP", certificate.follow)
            closing = trio.Event()
            clients = await nursery.start(_keep_clients, closing)
            log.info("HTTP requests are answered at %s", options.listen)
            task_status.started()
            try:
                await _accept(listeners, door, certificate, clients)
            finally:
                door.end_soon()
                clients.cancel_scope.deadline = trio.current_time() + END_SECONDS
                closing.set()


async def _keep_clients(closing: trio.Event, *, task_status: trio.TaskStatus[trio.Nursery]) -> None:
    """Have a nursery for connections, which a cancellation from outside does not end, until all have ended."""
    async with trio.open_nursery() as clients:
        clients.cancel_scope.shield = True
        task_status.started(clients)
        await closing.wait()


async def _listen(address: str, stack: AsyncExitStack) -> list[trio.SocketListener]:
    """MountError where nobody can listen there."""
    try:
        if address.startswith("unix:"):
            return [await _listen_at_path(Path(address.removeprefix("unix:")), stack)]
        host, _, port = address.rpartition(":")
        listeners = await trio.open_tcp_listeners(int(port), host=host.strip("[]"), backlog=BACKLOG)
    except OSError as error:
        raise MountError(f"http.listen: nobody can listen at {address}: {error.strerror or error}") from error
    for listener in listeners:
        await stack.enter_async_context(listener)
    return listeners


async def _listen_at_path(path: Path, stack: AsyncExitStack) -> trio.SocketListener:
    """Listen at a socket that every user may connect to: the kernel says who does. OSError."""
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise OSError(errno.EEXIST, "there is something else than a socket")
        with trio.socket.socket(socket.AF_UNIX) as former:
            try:
                await former.connect(os.fspath(path))
            except ConnectionRefusedError:
                path.unlink()
            else:
                raise OSError(errno.EADDRINUSE, "another process listens there")
    listener = trio.socket.socket(socket.AF_UNIX)
    stack.callback(listener.close)
    await listener.bind(os.fspath(path))
    stack.callback(path.unlink, missing_ok=True)
    path.chmod(0o666)
    listener.listen(BACKLOG)
    return trio.SocketListener(listener)


def open_files(options: HttpOptions) -> tuple[HttpUsers | None, HttpCertificate | None]:
    """Of the files that options name. ConfigError where one cannot be used."""
    users = HttpUsers(options.users) if options.users is not None else None
    if options.certificate is None or options.key is None:
        return users, None
    return users, HttpCertificate(options.certificate, options.key)


async def _accept(
    listeners: list[trio.SocketListener], door: HttpDoor, certificate: HttpCertificate | None, clients: trio.Nursery
) -> None:
    async def serve(stream: trio.SocketStream) -> None:
        await door.serve(stream, certificate.context if certificate is not None else None)

    await trio.serve_listeners(serve, listeners, handler_nursery=clients)


class HttpDoor:
    """All clients of one volume."""

    def __init__(self, volume: RingApi, options: HttpOptions, users: HttpUsers | None) -> None:
        self._volume = volume
        self._users = users
        self._is_socket = bool(options.listen and options.listen.startswith("unix:"))
        self._anonymous = None
        if options.anonymous is not None:
            uid, gid = map(int, options.anonymous.split(":"))
            self._anonymous = make_client(uid, gid)
        self._limit = ConnectionLimit(options.clients)
        self._connections: set[WebConnection] = set()
        self._requests = SharedUnits(4 * options.user_requests, options.user_requests, "requests under way")
        self._resources = Resources(volume, options)
        self._routes = Routes(self._resources.routes())
        self._counts = {"connections": 0, "requests": 0, "failures": 0}

    def statistics(self) -> dict[str, object]:
        """Counts since the door opened, and what is in use now."""
        return {
            **self._counts,
            "open": len(self._connections),
            "under_way": self._requests.used,
            "refused": self._requests.refused,
            **self._resources.statistics(),
        }

    def end_soon(self) -> None:
        """Close all connections, those that are served once they are."""
        for connection in list(self._connections):
            connection.end_soon()
        self._resources.end()

    async def serve(self, stream: trio.SocketStream, context: ssl.SSLContext | None) -> None:
        """Serve one client. Nothing that goes wrong with it is raised: that would end the door."""
        self._counts["connections"] += 1
        try:
            async with stream:
                with trio.CancelScope() as scope:
                    await self._serve(stream, context, scope)
        except GONE:
            pass
        except Exception:
            failing.failures["clients of HTTP"] += 1
            log.exception("serving a client of HTTP failed")

    async def _serve(
        self, plain: trio.SocketStream, context: ssl.SSLContext | None, scope: trio.CancelScope
    ) -> None:  # fmt: skip
        process, address = None, ""
        if self._is_socket:
            process = await ClientProcess.from_socket(plain.socket)
            address = f"uid {process.uid}"
        else:
            address = str(plain.socket.getpeername()[0])
        client = HttpClient(address, scope.cancel)
        if not self._limit.enter(client):
            return
        try:
            stream: Stream = plain
            if context is not None:
                stream = trio.SSLStream(plain, context, server_side=True, https_compatible=True)
                with trio.move_on_after(HEAD_SECONDS) as limit:
                    await stream.do_handshake()
                if limit.cancelled_caught:
                    return
            answerer = _Answerer(self, process)
            connection = WebConnection(stream, client, answerer)
            self._connections.add(connection)
            try:
                await connection.serve()
            finally:
                self._connections.discard(connection)
        except* (TooSlow, *GONE):
            pass
        finally:
            self._limit.leave(client)

    async def answer(self, request: WebRequest, slot: ExitStack) -> WebAnswer:
        """The answer of the handler that a request asks for; errors become problems. Raises only cancellations.

        ``slot``: closed when the answer was sent.
        """
        self._counts["requests"] += 1
        SERVED.set((f"http {request.method.lower()}", next(NUMBERS)))
        try:
            route, request.path = self._routes.find(request.method, request.path)
            check_parameters(route, request.query)
            if not route.is_public:
                request.caller, request.tokens = self._identify(request)
                slot.enter_context(self._requests.taking(request.caller.uid))
            return await route.handler(request)
        except Exception as error:
            return self._describe(error)

    def _describe(self, error: Exception) -> WebAnswer:
        self._counts["failures"] += 1
        number = errno_of(error)
        if not isinstance(error, WebError | OSError) and number is None:
            failing.failures["requests of HTTP"] += 1
            log.exception("a request of HTTP failed")
        elif not isinstance(error, WebError) and number in EXPECTED:
            log.warning("a request of HTTP failed: %s", error)
        return problem(error)

    def _identify(self, request: WebRequest) -> tuple[ClientProcess, tuple[str, ...]]:
        """(user, tokens of namespaces) of a request. WebError 401, 403."""
        tokens = tuple(token for token in request.headers.get("kvfuse-token", "").replace(",", " ").split() if token)
        if len(tokens) > TOKENS_MAX:
            raise WebError(400, f"a request shows {TOKENS_MAX} tokens of namespaces at most")
        if self._is_socket:
            return request.caller, tokens
        kind, _, token = request.headers.get("authorization", "").partition(" ")
        if kind.lower() in ("bearer", "basic") and self._users is not None:
            user = self._users.find(token.strip() if kind.lower() == "bearer" else _password_of(token))
            if user is not None:
                return user, tokens
        elif not kind and self._anonymous is not None:
            self._check_local(request)
            return self._anonymous, tokens
        raise WebError(
            401,
            "the request shows no token of a user that this server knows",
            "send the header Authorization: Bearer TOKEN",
            {"WWW-Authenticate": 'Bearer realm="kvfuse", Basic realm="kvfuse"'},
        )

    def _check_local(self, request: WebRequest) -> None:
        """WebError 403: a browser asks for a page of others, or by a name of others for this address."""
        host = request.headers.get("host", "").lower()
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        if "origin" in request.headers or (name not in LOCAL_HOSTS):
            raise WebError(403, "without a token only programs of this machine may ask, by a name such as localhost")


def _password_of(credentials: str) -> str:
    """The password of Basic credentials, which is a token; the name beside it says nothing. "": there is none."""
    try:
        return base64.b64decode(credentials.strip(), validate=True).decode("latin-1").partition(":")[2]
    except ValueError:
        return ""


class _Answerer:
    """Answers the requests of one connection."""

    def __init__(self, door: HttpDoor, process: ClientProcess | None) -> None:
        self._door = door
        self._process = process
        self._remembered: dict[object, Any] = {}
        self._slot = ExitStack()

    def done(self) -> None:
        """The answer was sent, or the client has gone."""
        self._slot.close()

    async def answer(self, head: h11.Request, body: RequestBody) -> WebAnswer:
        if len(self._remembered) > REMEMBERED_MAX:
            self._remembered.clear()
        try:
            names, query = split_target(bytes(head.target))
        except WebError as error:
            return problem(error)
        headers: dict[str, str] = {}
        for name, value in head.headers:
            key, text = name.decode("latin-1"), value.decode("latin-1")
            headers[key] = f"{headers[key]}, {text}" if key in headers else text
        method, caller = bytes(head.method).decode("ascii"), self._process or NOBODY
        return await self._door.answer(
            WebRequest(method, names, query, headers, body, caller, remembered=self._remembered), self._slot
        )


NOBODY = make_client((1 << 32) - 2, (1 << 32) - 2)
"""before it is known who asks"""
