"""Calls to an etcd cluster, over gRPC: fail-over, deadlines, users, TLS.

**Attempts.** A call is sent to one member; when that does not answer within ``ATTEMPT_SHARE`` of the call's deadline,
cannot be reached, or has no leader, it is sent again to another, after a short jittered pause and with a little
more time, until the deadline (``EngineTimeout``). So every call must be harmless when sent twice; a commit is, by its
marker. A request that a member passed to a leader that then died is lost: hence more than two attempts. While answers
take long, or after a call that got none, the attempts are fewer and longer: a cluster that is only slow answers those,
and is not asked more for being slow.

**Endpoints.** Calls stay with one member as long as it answers. One that failed is not asked again for a time that
doubles with each failure in a row, unless all have failed: then the one whose time ends first is.

**Connections.** A call has one for itself, see `http2`. One that was free, and turns out to be closed, says nothing of
its member: the call is sent again, to the same one.

**Users.** The token comes with the first call and is replaced when a member does not know it (any more).
"""

from __future__ import annotations

import math
import random
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar
from urllib.parse import urlsplit

import trio

from kvfuse.errors import ConfigError, EngineError, EngineFull, EngineTimeout
from kvfuse.native.messagefields import NoMessage
from kvfuse.options.options import EtcdOptions
from kvfuse.remote.records.etcd import http2, messages
from kvfuse.remote.records.etcd.http2 import Http2Connection, Http2Error

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
FREE_SECONDS = 5.0
"""how long a connection waits for a call"""
FREE_MAX = 32
"""connections that wait, to a member"""

KV_RANGE, KV_TXN, KV_PUT = "KV/Range", "KV/Txn", "KV/Put"
LEASE_GRANT, LEASE_REVOKE, LEASE_KEEP_ALIVE = "Lease/LeaseGrant", "Lease/LeaseRevoke", "Lease/LeaseKeepAlive"
WATCH, AUTHENTICATE, STATUS = "Watch/Watch", "Auth/Authenticate", "Maintenance/Status"

# gRPC's codes
OK, CANCELLED, UNKNOWN, INVALID, DEADLINE, NOT_FOUND, DENIED, EXHAUSTED, ABORTED = 0, 1, 2, 3, 4, 5, 7, 8, 10
OUT_OF_RANGE, UNAVAILABLE, UNAUTHENTICATED = 11, 14, 16
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


@dataclass
class Endpoint:
    """One member, and for how long it is not asked first. Times are trio's."""

    url: str
    failure_count: int = 0
    failed_at: float = -math.inf
    shunned_until: float = -math.inf
    answered_at: float = -math.inf
    _free: list[Http2Connection] = field(default_factory=list, repr=False)
    """the one that served last is at the end"""

    async def connection(self, tls: ssl.SSLContext | None) -> Http2Connection:
        """One that is free, or another. Http2Error."""
        while self._free and trio.current_time() - self._free[0].freed_at > FREE_SECONDS:
            self._free.pop(0).close()
        if self._free:
            return self._free.pop()
        url = urlsplit(self.url)
        secure = url.scheme == "https"
        return await http2.connect(url.hostname or "", url.port or (443 if secure else 80), tls if secure else None)

    def give_back(self, connection: Http2Connection) -> None:
        """Its call has ended, in whatever way."""
        if not connection.is_free or len(self._free) >= FREE_MAX:
            connection.close()
            return
        connection.freed_at = trio.current_time()
        self._free.append(connection)

    def disconnect(self) -> None:
        """Close what is free."""
        while self._free:
            self._free.pop().close()

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
    """Of one store."""

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
        self._tls = _tls(options)
        self._headers: dict[tuple[str, str, str], bytes] = {}
        """of (endpoint, method, token)"""

    async def call(self, method: str, message: bytes, parse: Callable[[bytes], _A], deadline: float) -> _A:
        """The answer of the first member that gives one before ``deadline`` (trio's time).

        ``parse`` makes it of its bytes. EngineTimeout: unknown. EngineFull, LeaseGone, Compacted, EngineError: what the
        members refused.
        """
        unsure = False
        pause = PAUSE_SECONDS_MIN
        patience = self._patience
        reason = "no answer"
        with self._counted():
            try:
                with trio.fail_at(deadline):
                    while True:
                        try:
                            return await self._attempt(self.choose(), method, message, parse, patience)
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
        message = messages.get(key, limit=1, keys_only=True)
        patience = self._patience * PROBE_ATTEMPTS
        try:
            await self._attempt(endpoint, KV_RANGE, message, messages.RangeAnswer.parse, patience)
        except Unanswered:
            return False
        return True

    async def version(self, endpoint: Endpoint) -> tuple[int, ...]:
        """Of this member's program. Unanswered."""
        parse = messages.StatusAnswer.parse
        return (await self._attempt(endpoint, STATUS, b"", parse, self._patience * PROBE_ATTEMPTS)).version

    async def stream(self, endpoint: Endpoint, method: str) -> tuple[Http2Connection, str]:
        """(a connection with a call without an end, of which nothing was sent, and its token). The caller closes it.
        Unanswered.
        """
        patience = self._patience * PROBE_ATTEMPTS
        token = await self._get_token(endpoint, patience)
        with self._attempting(endpoint, patience):
            connection = await endpoint.connection(self._tls)
        connection.start(self._get_headers(endpoint, method, token))
        return connection, token

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
        for endpoint in self._endpoints:
            endpoint.disconnect()

    @property
    def _patience(self) -> float:
        """Seconds that the first attempt of a call has."""
        return self.options.deadline * self._share

    def _answered(self, seconds: float) -> None:
        """An answer took so long, or did not come: what comes next may take twice that."""
        share = max(2 * seconds / self.options.deadline, SLOW_DECAY * self._share)
        self._share = min(max(share, ATTEMPT_SHARE), SLOW_SHARE_MAX)

    # -- one attempt ----------------------------------------------------------------------------------

    async def _attempt(
        self, endpoint: Endpoint, method: str, message: bytes, parse: Callable[[bytes], _A], patience: float
    ) -> _A:
        """One member's answer, within ``patience`` seconds (twice that with a login)."""
        began = trio.current_time()
        token = await self._get_token(endpoint, patience)
        answer = await self._ask(endpoint, method, message, parse, token, patience)
        endpoint.answered()
        self._answered(trio.current_time() - began)
        self.revision = max(self.revision, answer.revision)
        return answer

    async def _ask(
        self, endpoint: Endpoint, method: str, message: bytes, parse: Callable[[bytes], _A], token: str, patience: float
    ) -> _A:
        with self._attempting(endpoint, patience):
            connection = await endpoint.connection(self._tls)
            try:
                await connection.call(self._get_headers(endpoint, method, token), message)
            except Http2Error as error:
                if connection.call_count > 1:  # it waited, and may have been closed meanwhile, as may the others
                    endpoint.disconnect()
                    raise Unanswered(f"{endpoint.url}: {error}", sent=error.sent) from error
                raise
            finally:
                endpoint.give_back(connection)
            code, text = connection.outcome or (UNKNOWN, "")
            if code == OK:
                try:
                    if len(connection.messages) == 1:
                        return parse(connection.messages[0])
                except NoMessage as error:
                    raise Http2Error(f"not an answer of etcd's: {error}") from error
                raise Http2Error(f"{len(connection.messages)} messages for an answer")
        raise self.refusal(endpoint, code, text, token)

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
        except Http2Error as error:
            endpoint.failed()
            raise Unanswered(f"{endpoint.url}: {error}", sent=error.sent) from error

    def _get_headers(self, endpoint: Endpoint, method: str, token: str) -> bytes:
        headers = self._headers.get((endpoint.url, method, token))
        if headers is None:
            url = urlsplit(endpoint.url)
            # a member that knows no leader says so at once, and ends its streams
            more = {"hasleader": "true"} | ({"token": token} if token else {})
            path = f"/etcdserverpb.{method}"
            headers = http2.request_headers(path, url.netloc, secure=url.scheme == "https", more=more)
            self._headers[endpoint.url, method, token] = headers
        return headers

    async def _get_token(self, endpoint: Endpoint, patience: float) -> str:
        """Empty where there is no user; the first to come logs in for all."""
        if not self.options.user:
            return ""
        if not self._token:
            async with self._login_lock:
                if not self._token:
                    login = messages.login(self.options.user, self.place.password)
                    parse = messages.LoginAnswer.parse
                    self._token = (await self._ask(endpoint, AUTHENTICATE, login, parse, "", patience)).token
        return self._token

    def refusal(self, endpoint: Endpoint, code: int, text: str, token: str) -> Unanswered | EngineError:
        """What the end of a call means, with gRPC's code; ``token``: what it was sent with."""
        reason = f"{endpoint.url}: {text} (code {code})"
        stale = code == UNAUTHENTICATED or (code == INVALID and "revision of auth store" in text)
        if stale and self.options.user:
            if token == self._token:
                self._token = ""  # the next attempt logs in
                self._headers.clear()
            return Unanswered(reason, sent=False)
        if code in UNSURE_CODES:
            endpoint.failed()
            return Unanswered(reason, sent=True)
        if code == EXHAUSTED and "too many requests" in text:
            return Unanswered(reason, sent=False)
        return _refused(code, text, reason, self.place)

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
        # without a name etcd takes that of the client's certificate, if there is one
        who = f"user {place.options.user!r}" if place.options.user else "who is named in no records.user"
        return EngineError(f"{reason}: {who} needs read and write of all keys under {place.prefix!r}")
    if "user name is empty" in text:
        return EngineError(f"{reason}: etcd asks who this is: set records.user and records.password_file")
    return EngineError(reason)


def _tls(options: EtcdOptions) -> ssl.SSLContext | None:
    """ConfigError naming the file that cannot be used."""
    if not any(url.startswith("https:") for url in options.endpoints):
        return None
    try:
        context = ssl.create_default_context(cafile=options.ca_file)
        context.set_alpn_protocols(["h2"])
        # From Python 3.13 on it refuses authorities that merely do not state what their key is for, as openssl's
        # defaults make them and etcd takes them: what holds on one host shall hold on all.
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        if options.cert_file is not None:
            context.load_cert_chain(options.cert_file, options.key_file)
    except (OSError, ssl.SSLError) as error:
        files = ", ".join(str(file) for file in (options.ca_file, options.cert_file, options.key_file) if file)
        raise ConfigError(f"TLS to etcd: {error}; looked at {files}") from error
    return context
