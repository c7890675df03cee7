"""The part of librados' C interface that the segment engine needs, through ctypes. Without segments or trio.

ctypes lets go of the interpreter lock around every call. ``start_*`` never waits for a server and may be called on
the event loop's thread; ``connect``, ``RadosPool.close``, ``RadosPool.available_bytes``, ``RadosPool.cut_off`` and
``RadosPool.cancel`` may wait, and belong in a thread.

* A read goes from librados' message straight into the caller's memory, before its completion is announced.
* A write is copied by librados when it is started: its buffers are free as soon as ``start_write`` returned.
* ``cancel`` ends an operation here: it is announced at once, and librados touches its memory no more. What was
  already sent may still be carried out by a server.
* An operation whose server goes away is sent again, to whoever the cluster map then names. librados sees to that.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import json
import math
import os
from collections.abc import Sequence
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint8, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from kvfuse.errors import EngineError, EngineFull, EngineTimeout
from kvfuse.options.options import RadosOptions

LIBRARY = "librados.so.2"
CREATE_EXCLUSIVE = 1
CREATE_OR_LEAVE = 0
BALANCE_READS = 1
"""flag of a read: any replica may answer it"""
FULL_TRY = 64
"""flag of a write: fail in a full pool; without it librados holds the write back until there is room"""
OMAP_EQUAL = 1
UNBOUNDED = str(1 << 40)
BLOCKLIST_SECONDS = 24 * 3600
"""for which a client stays cut off: longer than what it has under way can last, and than its connections do"""

Callback = ctypes.CFUNCTYPE(None, c_void_p, c_void_p)
"""void callback(completion, tag)"""

_PROTOTYPES: dict[str, tuple[Any, ...] | None] = {
    "rados_create2": (c_void_p, c_char_p, c_char_p, c_uint64),
    "rados_conf_read_file": (c_void_p, c_char_p),
    "rados_conf_set": (c_void_p, c_char_p, c_char_p),
    "rados_connect": (c_void_p,),
    "rados_shutdown": (c_void_p,),
    "rados_cluster_stat": (c_void_p, c_void_p),
    "rados_mon_command": (c_void_p, c_void_p, c_size_t, c_char_p, c_size_t, c_void_p, c_void_p, c_void_p, c_void_p),
    "rados_buffer_free": (c_void_p,),
    "rados_getaddrs": (c_void_p, c_void_p),
    "rados_blocklist_add": (c_void_p, c_char_p, c_uint32),
    "rados_ioctx_create": (c_void_p, c_char_p, c_void_p),
    "rados_ioctx_set_namespace": (c_void_p, c_char_p),
    "rados_ioctx_destroy": (c_void_p,),
    "rados_aio_create_completion2": (c_void_p, Callback, c_void_p),
    "rados_aio_get_return_value": (c_void_p,),
    "rados_aio_release": (c_void_p,),
    "rados_aio_cancel": (c_void_p, c_void_p),
    "rados_create_read_op": (),
    "rados_release_read_op": (c_void_p,),
    "rados_read_op_read": (c_void_p, c_uint64, c_size_t, c_void_p, c_void_p, c_void_p),
    "rados_aio_read_op_operate": (c_void_p, c_void_p, c_void_p, c_char_p, c_int),
    "rados_create_write_op": (),
    "rados_release_write_op": (c_void_p,),
    "rados_write_op_create": (c_void_p, c_int, c_char_p),
    "rados_write_op_write": (c_void_p, c_void_p, c_size_t, c_uint64),
    "rados_write_op_remove": (c_void_p,),
    "rados_read_op_omap_get_vals_by_keys2": (c_void_p, c_void_p, c_size_t, c_void_p, c_void_p, c_void_p),
    "rados_omap_get_next2": None,
    "rados_omap_get_end": (c_void_p,),
    "rados_write_op_omap_cmp2": (c_void_p, c_char_p, c_uint8, c_char_p, c_size_t, c_size_t, c_void_p),
    "rados_write_op_omap_set2": (c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_size_t),
    "rados_write_op_omap_rm_keys2": (c_void_p, c_void_p, c_void_p, c_size_t),
    "rados_aio_write_op_operate": (c_void_p, c_void_p, c_void_p, c_char_p, c_void_p, c_int),
}
"""function -> types of its arguments; None: they are passed as they are, which takes half the time"""
_RETURN_NOTHING = {
    "rados_shutdown",
    "rados_buffer_free",
    "rados_ioctx_set_namespace",
    "rados_ioctx_destroy",
    "rados_aio_release",
    "rados_release_read_op",
    "rados_read_op_read",
    "rados_release_write_op",
    "rados_write_op_create",
    "rados_write_op_write",
    "rados_write_op_remove",
    "rados_read_op_omap_get_vals_by_keys2",
    "rados_omap_get_end",
    "rados_write_op_omap_cmp2",
    "rados_write_op_omap_set2",
    "rados_write_op_omap_rm_keys2",
}
_RETURN_POINTERS = {"rados_create_read_op", "rados_create_write_op"}


class ObjectRange(NamedTuple):
    """Bytes of one object, and where they lie in memory. Its maker keeps that memory alive."""

    offset: int
    address: int
    length: int


class OmapChange(NamedTuple):
    """Of one key of an object's omap."""

    key: bytes
    before: bytes
    """its value has to be this; b"": there is none"""
    after: bytes
    """its value then; b"": none"""


@dataclass(frozen=True)
class PoolPlace:
    """Where objects are kept, and as whom."""

    options: RadosOptions
    pool: str
    namespace: str

    def __str__(self) -> str:
        return f"RADOS pool {self.pool}, namespace {self.namespace}"


class _ClusterStat(ctypes.Structure):
    _fields_ = [(name, c_uint64) for name in ("kb", "kb_used", "kb_avail", "num_objects")]


@functools.cache
def library() -> ctypes.CDLL:
    """librados with its prototypes. EngineError where it is not installed."""
    try:
        loaded = ctypes.CDLL(LIBRARY)
    except OSError:
        raise EngineError(
            f"{LIBRARY} is not installed, the rados engine needs it: apt-get install librados2 (Debian, Ubuntu), "
            "dnf install librados2 (Fedora, RHEL)"
        ) from None
    for name, arguments in _PROTOTYPES.items():
        function = getattr(loaded, name)
        function.argtypes = arguments
        function.restype = None if name in _RETURN_NOTHING else c_void_p if name in _RETURN_POINTERS else c_int
    return loaded


def engine_error(code: int, what: str) -> EngineError:
    """librados' answer (an errno, negative or not) as this project's error."""
    number = abs(code)
    message = f"{what}: {os.strerror(number)}"
    if number in (errno.ENOSPC, errno.EDQUOT):
        return EngineFull(f"{message}: the pool or its OSDs are full (ceph df, ceph osd pool get-quota)")
    if number == errno.ETIMEDOUT:
        return EngineTimeout(message)
    hint = {
        errno.EPERM: ": the user's OSD capability does not allow this in that pool and namespace (ceph auth get)",
        errno.ESHUTDOWN: ": this client was put on the cluster's blocklist (ceph osd blocklist ls)",
        errno.EOPNOTSUPP: ": an erasure-coded pool must allow overwrites (allow_ec_overwrites)",
    }
    return EngineError(message + hint.get(number, ""))


class RadosPool:
    """A connection to one pool and namespace.

    ``callback`` gets each operation's completion and tag when it ended, in a thread of librados.
    """

    def __init__(self, lib: ctypes.CDLL, cluster: c_void_p, context: c_void_p, callback: Any, name: str) -> None:
        self._lib = lib
        self._name = name
        self._cluster = cluster
        self._context = context
        self._callback = callback  # librados keeps the bare pointer

    @classmethod
    def connect(cls, place: PoolPlace, callback: Any) -> Self:
        """Waits for a monitor for ``deadline`` seconds, rounded up to whole ones. EngineError, EngineTimeout."""
        lib, options = library(), place.options
        cluster, context = c_void_p(), c_void_p()
        _check(lib.rados_create2(byref(cluster), b"ceph", f"client.{options.user}".encode(), 0), "librados")
        try:
            _configure(lib, cluster, options)
            _check_connected(lib.rados_connect(cluster), options)
            code = lib.rados_ioctx_create(cluster, place.pool.encode(), byref(context))
            if code == -errno.ENOENT:
                raise EngineError(f"{options.conf_file}: the cluster has no pool {place.pool}: ceph osd pool create")
            _check(code, f"{place}: opening the pool as client.{options.user}")
        except BaseException:
            lib.rados_shutdown(cluster)
            raise
        lib.rados_ioctx_set_namespace(context, place.namespace.encode())
        return cls(lib, cluster, context, callback, place.pool)

    def close(self) -> None:
        """Every operation must have ended."""
        self._lib.rados_ioctx_destroy(self._context)
        self._lib.rados_shutdown(self._cluster)

    def available_bytes(self) -> int | None:
        """Bytes that the pool has room for, if nobody else writes; None where nobody counts them (no mgr).

        The cluster's free bytes shared by an object's replicas: too few for an erasure-coded pool, never too many.
        """
        stat = _ClusterStat()
        _check(self._lib.rados_cluster_stat(self._cluster, byref(stat)), "asking a monitor for the free space")
        return (stat.kb_avail << 10) // self.replica_count() if stat.kb else None

    def replica_count(self) -> int:
        """Copies, or parts, that an object of the pool has. EngineError."""
        answer = self._ask({"prefix": "osd pool get", "pool": self._name, "var": "size"})
        try:
            return int(json.loads(answer)["size"])
        except (ValueError, KeyError, TypeError) as error:
            raise EngineError(f"a monitor answered {answer!r} when asked for the size of pool {self._name}") from error

    def address(self) -> bytes:
        """This connection among all clients of the cluster."""
        text = c_void_p()
        _check(self._lib.rados_getaddrs(self._cluster, byref(text)), "librados")
        try:
            return ctypes.string_at(text)
        finally:
            self._lib.rados_buffer_free(text)

    def cut_off(self, address: bytes) -> bool:
        """Have servers refuse the client at this address. False: this user may not. EngineError, EngineTimeout.

        librados then knows the cluster map that says so, and each server learns it before it carries out an
        operation of this connection.
        """
        code = self._lib.rados_blocklist_add(self._cluster, address, BLOCKLIST_SECONDS)
        if code in (-errno.EACCES, -errno.EPERM):
            return False
        _check(code, f"cutting off the client at {address.decode(errors='replace')}")
        return True

    def _ask(self, question: dict[str, str]) -> bytes:
        """The answer of a monitor, as JSON. EngineError where it refuses."""
        words = (c_char_p * 1)(json.dumps({**question, "format": "json"}).encode())
        answer, answer_size, said, said_size = c_void_p(), c_size_t(), c_void_p(), c_size_t()
        code = self._lib.rados_mon_command(
            self._cluster, words, 1, None, 0, byref(answer), byref(answer_size), byref(said), byref(said_size)
        )
        try:
            why = ctypes.string_at(said, said_size.value).decode(errors="replace")
            _check(code, f"asking a monitor for '{question['prefix']}'{why and ': '}{why}")
            return ctypes.string_at(answer, answer_size.value)
        finally:
            self._lib.rados_buffer_free(answer)
            self._lib.rados_buffer_free(said)

    # -- operations: each returns its completion, to be released once it was announced ----------------

    def start_read(
        self, name: bytes, ranges: Sequence[ObjectRange], results: ReadResults, tag: int, flags: int = 0
    ) -> int:
        """Read ranges of one object in one operation. ``results`` is filled meanwhile and must be kept."""
        lib = self._lib
        operation = lib.rados_create_read_op()
        for index, (offset, address, length) in enumerate(ranges):
            lib.rados_read_op_read(
                operation, offset, length, address, results.length_address(index), results.code_address(index)
            )
        completion = self._new_completion(tag)
        code = lib.rados_aio_read_op_operate(operation, self._context, completion, name, flags)
        lib.rados_release_read_op(operation)
        return self._started(code, completion, name)

    def start_write(self, name: bytes, ranges: Sequence[ObjectRange], tag: int, *, exclusive: bool = False) -> int:
        """Write ranges of one object, all or nothing. The bytes are copied. ``exclusive``: -EEXIST if it is there."""
        operation = self._lib.rados_create_write_op()
        if exclusive:
            self._lib.rados_write_op_create(operation, CREATE_EXCLUSIVE, None)
        for offset, address, length in ranges:
            self._lib.rados_write_op_write(operation, address, length, offset)
        return self._start_change(operation, name, tag)

    def start_touch(self, name: bytes, tag: int) -> int:
        """Make an empty object, or leave the one that is there. Answered by all replicas."""
        operation = self._lib.rados_create_write_op()
        self._lib.rados_write_op_create(operation, CREATE_OR_LEAVE, None)
        return self._start_change(operation, name, tag)

    def start_remove(self, name: bytes, tag: int) -> int:
        """-ENOENT where there is no such object."""
        operation = self._lib.rados_create_write_op()
        self._lib.rados_write_op_remove(operation)
        return self._start_change(operation, name, tag)

    def start_omap_read(self, name: bytes, keys: Sequence[bytes], values: OmapValues, tag: int) -> int:
        """Read what these keys have. ``values`` is filled meanwhile and must be kept."""
        operation = self._lib.rados_create_read_op()
        self._lib.rados_read_op_omap_get_vals_by_keys2(
            operation, _texts(keys), len(keys), _sizes(keys), values.iterator, values.code
        )
        completion = self._new_completion(tag)
        code = self._lib.rados_aio_read_op_operate(operation, self._context, completion, name, 0)
        self._lib.rados_release_read_op(operation)
        return self._started(code, completion, name)

    def start_omap_change(self, name: bytes, changes: Sequence[OmapChange], tag: int) -> int:
        """Change keys, all or none: -ECANCELED where one has another value before. The bytes are copied."""
        lib = self._lib
        operation = lib.rados_create_write_op()
        lib.rados_write_op_create(operation, CREATE_OR_LEAVE, None)
        for key, before, _ in changes:
            lib.rados_write_op_omap_cmp2(operation, key, OMAP_EQUAL, before, len(key), len(before), None)
        put = [change.key for change in changes if change.after]
        if put:
            values = [change.after for change in changes if change.after]
            lib.rados_write_op_omap_set2(operation, _texts(put), _texts(values), _sizes(put), _sizes(values), len(put))
        gone = [change.key for change in changes if not change.after]
        if gone:
            lib.rados_write_op_omap_rm_keys2(operation, _texts(gone), _sizes(gone), len(gone))
        return self._start_change(operation, name, tag)

    def cancel(self, completion: int) -> None:
        """End an operation that was not announced yet, if it still can be: it is announced with -ECANCELED."""
        self._lib.rados_aio_cancel(self._context, completion)

    def code(self, completion: int) -> int:
        """The result of an announced operation: 0 or more, or a negative errno."""
        return int(self._lib.rados_aio_get_return_value(completion))

    def release(self, completion: int) -> None:
        """Let go of an announced operation. Nobody may be cancelling it."""
        self._lib.rados_aio_release(completion)

    def _start_change(self, operation: int, name: bytes, tag: int) -> int:
        completion = self._new_completion(tag)
        code = self._lib.rados_aio_write_op_operate(operation, self._context, completion, name, None, FULL_TRY)
        self._lib.rados_release_write_op(operation)
        return self._started(code, completion, name)

    def _new_completion(self, tag: int) -> int:
        completion = c_void_p()
        _check(self._lib.rados_aio_create_completion2(tag, self._callback, byref(completion)), "librados")
        assert completion.value is not None
        return completion.value

    def _started(self, code: int, completion: int, name: bytes) -> int:
        if code < 0:
            self._lib.rados_aio_release(completion)
            raise engine_error(code, f"object {name.decode()}")
        return completion


class ReadResults:
    """Where librados notes, for each range of a read, how many bytes there were and whether that range failed."""

    __slots__ = ("_codes", "_codes_address", "_lengths", "_lengths_address")

    def __init__(self, range_count: int) -> None:
        self._lengths = (c_size_t * range_count)()
        self._codes = (c_int * range_count)()
        self._lengths_address = ctypes.addressof(self._lengths)
        self._codes_address = ctypes.addressof(self._codes)

    def length_address(self, index: int) -> int:
        return self._lengths_address + index * ctypes.sizeof(c_size_t)

    def code_address(self, index: int) -> int:
        return self._codes_address + index * ctypes.sizeof(c_int)

    @property
    def lengths(self) -> list[int]:
        return list(self._lengths)

    @property
    def code(self) -> int:
        """The first range's error (a negative errno), or 0."""
        return min(self._codes, default=0)


_Text = ctypes.POINTER(ctypes.c_char)


class OmapValues:
    """Where librados notes what an object's omap has. Lives until the operation ended."""

    def __init__(self) -> None:
        self._iterator, self._code = c_void_p(), c_int()
        self.iterator, self.code = byref(self._iterator), byref(self._code)

    def take(self) -> dict[bytes, bytes]:
        """Key -> value, of those that are there. Once, when the operation ended."""
        following = library().rados_omap_get_next2
        key_size, value_size = c_size_t(), c_size_t()
        key: Any = _Text()
        value: Any = _Text()
        places = self._iterator, byref(key), byref(value), byref(key_size), byref(value_size)
        taken: dict[bytes, bytes] = {}
        while following(*places) == 0 and key:
            taken[key[: key_size.value]] = value[: value_size.value]
        return taken

    def __del__(self) -> None:
        if self._iterator:
            library().rados_omap_get_end(self._iterator)


def _texts(texts: Sequence[bytes]) -> ctypes.Array[c_char_p]:
    return (c_char_p * len(texts))(*texts)


def _sizes(texts: Sequence[bytes]) -> ctypes.Array[c_size_t]:
    return (c_size_t * len(texts))(*map(len, texts))


def _check(code: int, what: str) -> None:
    if code < 0:
        raise engine_error(code, what)


def _configure(lib: ctypes.CDLL, cluster: c_void_p, options: RadosOptions) -> None:
    _check(lib.rados_conf_read_file(cluster, os.fsencode(options.conf_file)), f"reading {options.conf_file}")
    seconds = str(math.ceil(options.deadline))
    settings = {
        "client_mount_timeout": seconds,
        "rados_mon_op_timeout": seconds,
        # librados would hold up the calling thread when this much is under way; each batch bounds itself instead
        "objecter_inflight_ops": UNBOUNDED,
        "objecter_inflight_op_bytes": UNBOUNDED,
    }
    if options.keyring is not None:
        settings["keyring"] = str(options.keyring)
    for name, value in settings.items():
        _check(lib.rados_conf_set(cluster, name.encode(), value.encode()), f"librados' setting {name} = {value}")


def _check_connected(code: int, options: RadosOptions) -> None:
    if code >= 0:
        return
    who = f"{options.conf_file}: connecting as client.{options.user}"
    if -code == errno.ETIMEDOUT:
        raise EngineTimeout(f"{who}: no monitor answered within {options.deadline:g} s; see mon_host in that file")
    if -code in (errno.EACCES, errno.EPERM, errno.EINVAL, errno.ENOENT):
        keyring = options.keyring or "the keyring that file names"
        raise EngineError(f"{who} was refused ({os.strerror(-code)}): no valid key for this user in {keyring}")
    raise engine_error(code, who)
