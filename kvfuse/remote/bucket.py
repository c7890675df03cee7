"""One bucket of an S3 server, through obstore: objects are got by ranges, put whole, listed, deleted.

Requests run in threads, of which a bucket has a bounded number. obstore sends again what a server refused or dropped. A
request that ended is over: obstore gives up after ``deadline`` seconds, and so do these calls. A put that was late is
*unknown*: the server may still carry it out. With ``expected`` it can do so only in the place of what the caller knew.

Bodies are not hashed for the signature (UNSIGNED-PAYLOAD): that would take four times the processor time of a put, and
whoever stores bytes here has checksums of their own.
"""

from __future__ import annotations

import configparser
import re
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import obstore
import trio
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError
from obstore.store import S3Store

from kvfuse.errors import ConfigError, EngineError, EngineTimeout
from kvfuse.options.options import BucketOptions

T = TypeVar("T")

ABSENT = ""
"""as the tag that is expected: there is no such object"""
DELETED_AT_ONCE = 1000
"""objects that one request deletes"""
READ_STEP = 1 << 20
"""bytes of a body that are copied together"""


class Changed(EngineError):
    """The object is not the one that was expected: nothing was put."""


class NoObject(EngineError):
    """There is no such object."""


class ObjectInfo(NamedTuple):
    """One row of `Bucket.list`."""

    name: str
    size: int
    tag: str


class Range(NamedTuple):
    """What is read of an object."""

    offset: int
    target: memoryview
    """writable; its length is that of the range"""


class Bucket:
    """Any number of callers, in one event loop. All calls raise EngineError, EngineTimeout."""

    def __init__(self, options: BucketOptions, deadline: float, in_flight: int) -> None:
        """ConfigError: there is no bucket, or its keys cannot be read. Nothing is sent yet."""
        if options.bucket is None:
            raise ConfigError("no bucket is named: set the key bucket beside engine 's3'")
        self._prefix = options.prefix or ""
        self.title = f"s3://{options.bucket}/{self._prefix}"
        self.deadline = deadline
        self.requests = 0
        self._limiter = trio.CapacityLimiter(in_flight)
        self._store = _open(options, options.bucket, deadline)
        self._has_bare_tags = False
        """the server compares tags without their quotes"""

    async def read(self, name: str, ranges: Sequence[Range]) -> str:
        """Fill the targets, with zeros behind the object's end. Its tag. NoObject: they are as they were.

        A call that is cancelled, or late, returns at once: nothing is written to the targets afterwards.
        """
        reading = _Reading(ranges)
        try:
            with trio.fail_after(self.deadline):
                return await self._run(lambda: reading.run(self._store, self._prefix + name))
        except trio.TooSlowError:
            raise EngineTimeout(f"{self.title}{name} was not read within {self.deadline:g} s") from None
        finally:
            reading.abandon()

    async def get(self, name: str) -> tuple[bytes, str]:
        """A small object, and its tag. NoObject."""

        def call() -> tuple[bytes, str]:
            result = obstore.get(self._store, self._prefix + name)
            return bytes(result.bytes()), result.meta["e_tag"] or ""

        return await self._run(call, name)

    async def put(self, name: str, data: Any, expected: str | None = None, *, is_given: bool = False) -> str:
        """Store an object; its tag. ``expected``: only in the place of the object with this tag, or `ABSENT`. Changed.

        ``data``: a buffer, which is read until this returns, also if cancelled; ``is_given``: nobody else changes it or
        takes its memory away, so a cancelled call returns at once.
        """
        return await self._run(lambda: self._put(self._prefix + name, data, expected), name, abandon=is_given)

    def _put(self, path: str, data: Any, expected: str | None) -> str:
        """In a thread. The gateway of older Ceph knows a tag only without quotes, and says that it is another one."""

        def put(mode: Any) -> str:
            return obstore.put(self._store, path, data, mode=mode, use_multipart=False)["e_tag"] or ""

        if not expected:
            return put("overwrite" if expected is None else "create")
        bare = expected.strip('"')
        try:
            return put({"e_tag": bare if self._has_bare_tags else expected})
        except PreconditionError:
            if self._has_bare_tags or obstore.head(self._store, path)["e_tag"] != expected:
                raise
        tag = put({"e_tag": bare})
        self._has_bare_tags = True
        return tag

    async def tag(self, name: str) -> str:
        """Of an object; `ABSENT`."""
        try:
            return await self._run(lambda: obstore.head(self._store, self._prefix + name)["e_tag"] or "")
        except NoObject:
            return ABSENT

    async def folders(self) -> list[str]:
        """The first parts of names that have a slash."""
        cut, prefix = len(self._prefix), self._prefix or None
        found = await self._run(lambda: obstore.list_with_delimiter(self._store, prefix)["common_prefixes"])
        return [name[cut:].rstrip("/") for name in found]

    async def delete(self, names: Sequence[str]) -> None:
        """Delete objects; those that there are not are as wanted."""
        for start in range(0, len(names), DELETED_AT_ONCE):
            some = [self._prefix + name for name in names[start : start + DELETED_AT_ONCE]]
            with suppress(NoObject):
                await self._run(lambda some=some: obstore.delete(self._store, some))  # type: ignore[misc]

    async def list(self, prefix: str) -> list[ObjectInfo]:
        """All objects whose names begin with ``prefix``, which ends with a slash, by name."""
        cut = len(self._prefix)

        def call() -> list[ObjectInfo]:
            found = []
            for chunk in obstore.list(self._store, self._prefix + prefix):
                found += [ObjectInfo(one["path"][cut:], one["size"], one["e_tag"] or "") for one in chunk]
            return sorted(found)

        return await self._run(call, prefix)

    async def _run(self, call: Callable[[], T], name: str = "", *, abandon: bool = True) -> T:
        self.requests += 1
        try:
            return await trio.to_thread.run_sync(call, limiter=self._limiter, abandon_on_cancel=abandon)
        except FileNotFoundError:
            raise NoObject(f"there is no object {self.title}{name}") from None
        except (AlreadyExistsError, PreconditionError):
            raise Changed(f"another host has changed {self.title}{name}") from None
        except (BaseError, OSError, ValueError) as error:
            raise self._translate(name, error) from None

    def _translate(self, name: str, error: Exception) -> EngineError:
        """obstore's text without its second part, which repeats the first one in Rust's words."""
        text = str(error).partition("\n\nDebug source")[0]
        code = re.search(r"<Code>(\w+)</Code>", text)
        reason = code[1] if code else " ".join(text.split())[:300]
        if re.search(r"TimedOut|timed out|kind: Timeout", str(error)):
            return EngineTimeout(f"{self.title}{name}: no answer within {self.deadline:g} s")
        if reason == "NoSuchBucket":
            reason = "there is no such bucket: make it, or name another one"
        return EngineError(f"{self.title}{name}: {reason}")


class _Reading:
    """Ranges of one object that a thread reads; `abandon` returns when it writes no more."""

    def __init__(self, ranges: Sequence[Range]) -> None:
        self._ranges = ranges
        self._lock = threading.Lock()
        self._is_abandoned = False

    def abandon(self) -> None:
        with self._lock:
            self._is_abandoned = True

    def run(self, store: S3Store, path: str) -> str:
        tag = ""
        for offset, target in self._ranges:
            wanted, done = len(target), 0
            try:
                result = obstore.get(store, path, options={"range": (offset, offset + wanted)})
            except BaseError as error:
                if "416" not in str(error):
                    raise
            else:
                tag = result.meta["e_tag"] or ""
                for chunk in result.stream(min_chunk_size=READ_STEP):
                    size = min(len(chunk), wanted - done)
                    if not self._copy(target, done, memoryview(chunk)[:size]):
                        return tag
                    done += size
            if done < wanted and not self._copy(target, done, memoryview(bytes(wanted - done))):
                return tag
        return tag

    def _copy(self, target: memoryview, start: int, data: memoryview) -> bool:
        """False: nobody waits any more."""
        with self._lock:
            if not self._is_abandoned:
                target[start : start + len(data)] = data
            return not self._is_abandoned


def _open(options: BucketOptions, bucket: str, deadline: float) -> S3Store:
    client: Any = {"timeout": timedelta(seconds=deadline), "connect_timeout": timedelta(seconds=deadline)}
    client["allow_http"] = options.endpoint is not None and options.endpoint.startswith("http://")
    if options.ca_file is not None:
        client["root_certificate"] = _read_file(options.ca_file, "ca_file")
    keys = read_keys(options.credentials_file) if options.credentials_file is not None else {}
    more: dict[str, Any] = {"endpoint": options.endpoint} if options.endpoint is not None else {}
    try:
        return S3Store(
            bucket, region=options.region, virtual_hosted_style_request=not options.path_style, unsigned_payload=True,
            client_options=client, retry_config={"max_retries": 3, "retry_timeout": timedelta(seconds=deadline)},
            **keys, **more,
        )  # fmt: skip
    except (BaseError, ValueError, OSError) as error:
        raise ConfigError(f"the bucket {bucket} cannot be used: {str(error).partition(chr(10))[0]}") from None


def read_keys(file: Path) -> dict[str, Any]:
    """The keys of a file such as ~/.aws/credentials: of its first section. ConfigError."""
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read_string(_read_file(file, "credentials_file").decode())
        section = parser[parser.sections()[0]]
        keys = {name: section[f"aws_{name}"] for name in ("access_key_id", "secret_access_key")}
    except (configparser.Error, UnicodeDecodeError, IndexError, KeyError):
        raise ConfigError(
            f"credentials_file: {file} needs a line [default], and below it aws_access_key_id = ... and "
            "aws_secret_access_key = ..."
        ) from None
    if token := section.get("aws_session_token"):
        keys["session_token"] = token
    return keys


def _read_file(file: Path, key: str) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{key}: {file} cannot be read: {error.strerror}") from None
