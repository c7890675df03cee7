"""Calls to an etcd cluster through the JSON gateways of its members: fail-over, deadlines, users, TLS.

**Attempts.** A call is sent to one member; when that does not answer within ``ATTEMPT_SHARE`` of the call's deadline,
cannot be reached, or has no leader, it is sent again to another, after a short jittered pause and with a little
more time, until the deadline (``EngineTimeout``). So every call must be harmless when sent twice; a commit is, by its
marker. A request that a member passed to a leader that then died is lost: hence more than two attempts. While answers
take long, or after a call that got none, the attempts are fewer and longer: a cluster that is only slow answers those,
and is not asked more for being slow.

**Endpoints.** Calls stay with one member as long as it answers. One that failed is not asked again for a time that
doubles with each failure in a row, unless all have failed: then the one whose time ends first is.

**Users.** The token comes with the first call and is replaced when a member does not know it (any more).
"""

from __future__ import annotations

import math
import random
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NoReturn, TypeVar

import httpcore
import msgspec
import trio
from msgspec.json import Decoder

from kvfuse.errors import ConfigError, EngineError, EngineFull, EngineTimeout
from kvfuse.options.options import EtcdOptions
from kvfuse.remote.records.etcd import messages

_A = TypeVar("_A", bound=messages.EtcdAnswer)

ATTEMPT_SHARE = 0.1
"""of a call's deadline that the first member may take to answer"""
ATTEMPT_GROWTH = 1.3
"""how much longer each further attempt may take: a slow cluster is not asked in vain again and again"""
SLOW_SHARE_MAX = 0.4
"""the same at most, where answers took long or calls got none: so long a cluster may take that is only slow"""
SLOW_DECAY = 0.8
"""of that after each quick answer"""
PROBE_ATTEMPTS = 2
"""So many times as long a member may take that is asked whether it is there, or to begin an answer without an end."""
PAUSE_SECONDS_MIN = 0.02
PAUSE_SECONDS_MAX = 0.25
SHUN_SECONDS_MIN = 0.5
SHUN_SECONDS_MAX = 16.0
TOGETHER_SECONDS = 0.25
"""calls that fail within this time have met the same failure"""
CLOSE_SECONDS = 2.0
OK = 200
HEADERS = {
    # a member that knows no leader says so at once, and ends its streams
    "Grpc-Metadata-hasleader": "true",
    # by this etcd knows a call through its gateway; without it, it takes the gateway's certificate for the caller's
    "Accept": "application/json",
}

# gRPC's codes
CANCELLED, UNKNOWN, INVALID, DEADLINE, NOT_FOUND, DENIED, EXHAUSTED, ABORTED, OUT_OF_RANGE = 1, 2, 3, 4, 5, 7, 8, 10, 11
UNAVAILABLE, UNAUTHENTICATED = 14, 16
TRANSPORT_ERRORS = (httpcore.TimeoutException, httpcore.NetworkError, httpcore.ProtocolError)
UNSURE_CODES = {CANCELLED, UNKNOWN, DEADLINE, ABORTED, UNAVAILABLE}
"""the member does not know what becomes of the call, or has no leader: another may"""


@dataclass(frozen=True)
class EtcdPlace:
    """Which keys of a cluster are one store's, and how to reach them."""

    options: EtcdOptions
    prefix: bytes
    """what every key of this store begins with"""
    password: str = field(default="", repr=False)


class LeaseGone(EngineError):
    """A call named a lease that has ended."""


class Compacted(EngineError):
    """The revision asked for is no longer kept."""


class Unanswered(Exception):
    """One attempt failed; another may not. ``sent``: it may have been done all the same."""

    def __init__(self, reason: str, *, sent: bool) -> None:
        super().__init__(reason)
        self.sent = sent


class _Body:
    """A request's bytes, at once. httpcore's is a generator: trio warns of one that a cancelled call leaves behind."""

    def __init__(self, body: bytes) -> None:
        self._parts = [body]

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        if not self._parts:
            raise StopAsyncIteration
        return self._parts.pop()


class _Connecting(httpcore.AsyncNetworkStream):
    """A TCP connection that a TLS handshake ends where it fails, also where the caller is cancelled.

    httpcore's own closes it for errors alone: of a member that does not answer, each cancelled call would leave a
    descriptor to the next garbage collection.
    """

    def __init__(self, stream: httpcore.AsyncNetworkStream) -> None:
        self._stream = stream

    async def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.AsyncNetworkStream:
        try:
            return await self._stream.start_tls(ssl_context, server_hostname, timeout)
        except BaseException:
            await self._stream.aclose()  # it is closed before this is cancelled
            raise


class _TlsBackend(httpcore.TrioBackend):
    async def connect_tcp(self, *arguments: Any, **more: Any) -> httpcore.AsyncNetworkStream:
        return _Connecting(await super().connect_tcp(*arguments, **more))


@dataclass
class Endpoint:
    """One member, and for how long it is not asked first. Times are trio's."""

    url: str
    failure_count: int = 0
    failed_at: float = -math.inf
    shunned_until: float = -math.inf
    answered_at: float = -math.inf

    def answered(self) -> None:
        self.answered_at = trio.current_time()
        self.failure_count = 0
        self.shunned_until = -math.inf

    def failed(self) -> None:
        now = trio.current_time()
        if now - self.failed_at > TOGETHER_SECONDS:
            self.failure_count += 1
        shun_seconds = min(SHUN_SECONDS_MIN * 2.0 ** (self.failure_count - 1), SHUN_SECONDS_MAX)
        self.failed_at = now
        self.shunned_until = now + shun_seconds * random.uniform(0.75, 1.25)


class EtcdClient:
    """One connection pool to all members."""

    def __init__(self, place: EtcdPlace) -> None:
        self.place = place
        self.options = options = place.options
        self.revision = 0
        """the newest revision of the store that an answer has told of"""
        self.closed = False
        self._endpoints = [Endpoint(url.rstrip("/")) for url in options.endpoints]
        random.shuffle(self._endpoints)  # clients spread over the members
        self._current = self._endpoints[0]
        self._share = ATTEMPT_SHARE
        """of a call's deadline that its first attempt has"""
        self._token = ""
        self._login_lock = trio.Lock()
        self._call_count = 0
        self._idle = trio.Event()
        tls = _tls(options)
        self._http = httpcore.AsyncConnectionPool(
            tls,
            max_connections=None,
            max_keepalive_connections=32,
            keepalive_expiry=5.0,
            network_backend=httpcore.TrioBackend() if tls is None else _TlsBackend(),
        )

    async def call(self, method: str, message: messages.EtcdMessage, decoder: Decoder[_A], deadline: float) -> _A:
        """The answer of the first member that gives one before ``deadline`` (trio's time).

        EngineTimeout: unknown. EngineFull, LeaseGone, Compacted, EngineError: what the members refused.
        """
        body = messages.encode(message)
        unsure = False
        pause = PAUSE_SECONDS_MIN
        patience = self._patience
        reason = "no answer"
        with self._counted():
            try:
                with trio.fail_at(deadline):
                    while True:
                        try:
                            return await self._attempt(self.choose(), method, body, decoder, patience)
                        except Unanswered as error:
                            unsure |= error.sent
                            reason = str(error)
                        await trio.sleep(pause * random.uniform(0.5, 1.0))
                        pause = min(2 * pause, PAUSE_SECONDS_MAX)
                        patience *= ATTEMPT_GROWTH
            except trio.TooSlowError:
                seconds = self.options.deadline
                self._answered(seconds)
                raise EngineTimeout(f"etcd did not answer {method} within {seconds:g} s; at last: {reason}") from None
            except EngineFull as error:
                if unsure:
                    raise EngineError(f"{error}; an earlier attempt may have been done") from error
                raise

    async def probe(self, endpoint: Endpoint, key: bytes) -> bool:
        """That this very member answers, and with the present state."""
        message = messages.encode(messages.Range(key, limit=1, keys_only=True))
        try:
            await self._attempt(endpoint, "kv/range", message, messages.RANGE, self._patience * PROBE_ATTEMPTS)
        except Unanswered:
            return False
        return True

    async def stream(self, endpoint: Endpoint, method: str, message: messages.EtcdMessage) -> httpcore.Response:
        """Begin an answer without an end. The caller closes it. Unanswered when it does not begin."""
        patience = self._patience * PROBE_ATTEMPTS
        headers = await self._headers(endpoint, patience)
        with self._attempting(endpoint, patience):
            response = await self._begin(endpoint, method, messages.encode(message), headers)
            if response.status != OK:
                await _read(response)
        if response.status != OK:
            self._raise_refusal(endpoint, _refusal(response.content), headers)
        endpoint.answered()
        return response

    def choose(self) -> Endpoint:
        """The member to ask: the same as before, unless it failed lately and another did not."""
        now = trio.current_time()
        if self._current.shunned_until > now:
            self._current = min(self._endpoints, key=lambda endpoint: max(endpoint.shunned_until, now))
        return self._current

    def check_open(self) -> None:
        """EngineError after ``aclose``."""
        if self.closed:
            raise EngineError(f"the store at {self.options.endpoints[0]} is closed")

    async def aclose(self) -> None:
        """Wait for the calls under way, which have their deadlines, and let go of the connections."""
        self.closed = True
        if self._call_count:
            await self._idle.wait()
        await self._http.aclose()

    @property
    def _patience(self) -> float:
        """Seconds that the first attempt of a call has."""
        return self.options.deadline * self._share

    def _answered(self, seconds: float) -> None:
        """An answer took so long, or did not come: what comes next may take twice that."""
        share = max(2 * seconds / self.options.deadline, SLOW_DECAY * self._share)
        self._share = min(max(share, ATTEMPT_SHARE), SLOW_SHARE_MAX)

    # -- one attempt ----------------------------------------------------------------------------------

    async def _attempt(self, endpoint: Endpoint, method: str, body: bytes, decoder: Decoder[_A], patience: float) -> _A:
        """One member's answer, within ``patience`` seconds (twice that with a login)."""
        began = trio.current_time()
        headers = await self._headers(endpoint, patience)
        response = await self._post(endpoint, method, body, headers, patience)
        if response.status != OK:
            self._raise_refusal(endpoint, _refusal(response.content), headers)
        answer = _decoded(endpoint, decoder, response.content)
        if isinstance(answer, messages.KeepaliveAnswer) and answer.error is not None:
            self._raise_refusal(endpoint, messages.Refusal(error=answer.error), headers)
        endpoint.answered()
        self._answered(trio.current_time() - began)
        self.revision = max(self.revision, answer.header.revision)
        return answer

    async def _post(
        self, endpoint: Endpoint, method: str, body: bytes, headers: dict[str, str], patience: float
    ) -> httpcore.Response:
        with self._attempting(endpoint, patience):
            response = await self._begin(endpoint, method, body, headers)
            await _read(response)
        return response

    async def _begin(self, endpoint: Endpoint, method: str, body: bytes, headers: dict[str, str]) -> httpcore.Response:
        # httpcore's own Host would lack the brackets of an IPv6 address
        framing = {"Host": endpoint.url.partition("://")[2], "Content-Length": str(len(body))}
        sent = [*(framing | HEADERS | headers).items()]
        url = _url(f"{endpoint.url}/v3/{method}")
        return await self._http.handle_async_request(httpcore.Request("POST", url, headers=sent, content=_Body(body)))

    @contextmanager
    def _attempting(self, endpoint: Endpoint, patience: float) -> Iterator[None]:
        """Give one member its time. Unanswered, and the member shunned, when it does not answer in it."""
        try:
            with trio.fail_after(patience):
                yield
        except trio.TooSlowError:
            endpoint.failed()
            reason = f"{endpoint.url} did not answer within {patience:.2g} s"
            raise Unanswered(reason, sent=True) from None
        except TRANSPORT_ERRORS as error:
            endpoint.failed()
            reason = f"{endpoint.url}: {_root(error)!r}"
            raise Unanswered(reason, sent=not isinstance(error, httpcore.ConnectError)) from error

    async def _headers(self, endpoint: Endpoint, patience: float) -> dict[str, str]:
        """With the token, where there is a user; the first to come logs in for all."""
        if not self.options.user:
            return {}
        if not self._token:
            async with self._login_lock:
                if not self._token:
                    self._token = await self._login(endpoint, patience)
        return {"Authorization": self._token}

    async def _login(self, endpoint: Endpoint, patience: float) -> str:
        login = messages.encode(messages.Login(self.options.user or "", self.place.password))
        response = await self._post(endpoint, "auth/authenticate", login, {}, patience)
        if response.status != OK:
            self._raise_refusal(endpoint, _refusal(response.content), {})
        return _decoded(endpoint, messages.LOGIN, response.content).token

    def _raise_refusal(self, endpoint: Endpoint, refusal: messages.Refusal, headers: dict[str, str]) -> NoReturn:
        """Raise what a refusal means."""
        code, text = refusal.code, refusal.error or refusal.message
        if isinstance(text, messages.StreamError):
            code, text = text.grpc_code, text.message
        reason = f"{endpoint.url}: {text} (code {code})"
        stale = code == UNAUTHENTICATED or (code == INVALID and "revision of auth store" in text)
        if stale and self.options.user:
            if headers.get("Authorization") == self._token:
                self._token = ""  # the next attempt logs in
            raise Unanswered(reason, sent=False)
        if code in UNSURE_CODES:
            endpoint.failed()
            raise Unanswered(reason, sent=True)
        if code == EXHAUSTED and "too many requests" in text:
            raise Unanswered(reason, sent=False)
        raise _refused(code, text, reason, self.place)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self._call_count += 1
        try:
            yield
        finally:
            self._call_count -= 1
            if self.closed and not self._call_count:
                self._idle.set()


def _refused(code: int, text: str, reason: str, place: EtcdPlace) -> EngineError:
    """The error for a call that was not done and will not be, whoever is asked."""
    if code == NOT_FOUND and "lease" in text:
        return LeaseGone(reason)
    if code == OUT_OF_RANGE and "compacted" in text:
        return Compacted(reason)
    if code == EXHAUSTED and "space" in text:
        return EngineFull(f"{reason}: compact and defragment etcd, or raise its --quota-backend-bytes")
    if code == DENIED:
        user = place.options.user or ""
        return EngineError(f"{reason}: user {user!r} needs read and write of all keys under {place.prefix!r}")
    if "user name is empty" in text:
        return EngineError(f"{reason}: etcd asks who this is: set records.user and records.password_file")
    return EngineError(reason)


@lru_cache
def _url(text: str) -> httpcore.URL:
    """Parsed once: there are few."""
    return httpcore.URL(text)


async def _read(response: httpcore.Response) -> None:
    """All of it, so that its connection serves the next."""
    await response.aread()
    await response.aclose()


def _root(error: BaseException) -> BaseException:
    """The message of the first cause: httpcore's own errors often have none."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return error


def _refusal(body: bytes) -> messages.Refusal:
    """The error that a member answered; a proxy's page, or anything else, counts as "unavailable"."""
    try:
        return messages.REFUSAL.decode(body)
    except msgspec.DecodeError:
        return messages.Refusal(UNAVAILABLE, f"not an answer of etcd's: {body[:80]!r}")


def _decoded(endpoint: Endpoint, decoder: Decoder[_A], body: bytes) -> _A:
    try:
        return decoder.decode(body)
    except msgspec.DecodeError as error:
        endpoint.failed()
        raise Unanswered(f"{endpoint.url}: not an answer of etcd's: {error}: {body[:80]!r}", sent=True) from error


def _tls(options: EtcdOptions) -> ssl.SSLContext | None:
    """ConfigError naming the file that cannot be used."""
    if not any(url.startswith("https:") for url in options.endpoints):
        return None
    try:
        context = ssl.create_default_context(cafile=options.ca_file)
        # From Python 3.13 on it refuses authorities that merely do not state what their key is for, as openssl's
        # defaults make them and etcd takes them: what holds on one host shall hold on all.
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        if options.cert_file is not None:
            context.load_cert_chain(options.cert_file, options.key_file)
    except (OSError, ssl.SSLError) as error:
        files = ", ".join(str(file) for file in (options.ca_file, options.cert_file, options.key_file) if file)
        raise ConfigError(f"TLS to etcd: {error}; looked at {files}") from error
    return context
