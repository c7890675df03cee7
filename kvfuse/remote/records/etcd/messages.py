"""Messages of etcd's v3 API, in the wire format of Protocol Buffers: what is sent, and what is read of the answers.

Names and numbers are those of etcd's rpc.proto and kv.proto. A function that makes a message returns its bytes; a field
that has its default is left out. What is not read of an answer is passed over. NoMessage: it is
no such answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

from kvfuse.native.messagefields import NoMessage, fields

GREATER, LESS = 1, 2
_VARINT, _BYTES = 0, 2


# -- the wire format ----------------------------------------------------------------------------------


def varint(value: int) -> bytes:
    if value < 0:
        value += 1 << 64
    if value < 128:
        return bytes((value,))
    parts = bytearray()
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    parts.append(value)
    return bytes(parts)


@lru_cache(maxsize=1024)
def head(number: int, size: int) -> bytes:
    """What stands before a field of so many bytes."""
    return varint(number << 3 | _BYTES) + varint(size)


def _sized(number: int, data: bytes) -> bytes:
    return head(number, len(data)) + data


def _bytes(number: int, data: bytes) -> bytes:
    return head(number, len(data)) + data if data else b""


def _integer(number: int, value: int) -> bytes:
    return varint(number << 3 | _VARINT) + varint(value) if value else b""


# -- sent ---------------------------------------------------------------------------------------------


def get(key: bytes, end: bytes = b"", *, limit: int = 0, revision: int = 0, keys_only: bool = False) -> bytes:
    """RangeRequest: of one key, or of those from it to before ``end``. ``revision`` 0: the present."""
    return b"".join((_sized(1, key), _bytes(2, end), _integer(3, limit), _integer(4, revision), _integer(8, keys_only)))


def put(key: bytes, value: bytes, lease: int = 0, *, shows_former: bool = False) -> bytes:
    """PutRequest. ``shows_former``: the answer has what was there."""
    return _integer(3, lease) + _integer(4, shows_former) + _sized(1, key) + _bytes(2, value)


def get_operation(request: bytes) -> bytes:
    """RequestOp; ``request`` is of `get`."""
    return _sized(1, request)


def put_operation(request: bytes) -> bytes:
    """RequestOp; ``request`` is of `put`."""
    return _sized(2, request)


def delete_operation(key: bytes, end: bytes = b"") -> bytes:
    """RequestOp: of one key, or of those from it to before ``end``."""
    return _sized(3, _sized(1, key) + _bytes(2, end))


def transaction_operation(request: bytes) -> bytes:
    """RequestOp; ``request`` is of `transaction`."""
    return _sized(4, request)


def was_changed_at(key: bytes, revision: int) -> bytes:
    """Compare: the key was changed last at this revision; 0: it is absent. ("EQUAL" is the default of its result.)"""
    return b"\x10\x02\x30" + varint(revision) + _sized(3, key)


def compare_value(key: bytes, value: bytes, result: int) -> bytes:
    """Compare: the key's value is GREATER or LESS than this one. Neither holds of an absent key."""
    return b"\x08" + varint(result) + b"\x10\x03" + _sized(3, key) + _sized(7, value)


def transaction(compares: Iterable[bytes], success: Iterable[bytes], failure: Iterable[bytes] = ()) -> bytes:
    """TxnRequest."""
    parts = [part for compare in compares for part in (head(1, len(compare)), compare)]
    parts += [part for operation in success for part in (head(2, len(operation)), operation)]
    parts += [part for operation in failure for part in (head(3, len(operation)), operation)]
    return b"".join(parts)


def login(name: str, password: str) -> bytes:
    """AuthenticateRequest."""
    return _bytes(1, name.encode()) + _bytes(2, password.encode())


def lease_grant(ttl: int) -> bytes:
    """LeaseGrantRequest. Seconds."""
    return _integer(1, ttl)


def lease_call(lease_id: int) -> bytes:
    """LeaseRevokeRequest, LeaseKeepAliveRequest."""
    return _integer(1, lease_id)


def watch_create(watch_id: int, key: bytes, end: bytes, revision: int, *, notify: bool) -> bytes:
    """WatchRequest: changes of keys from ``key`` to before ``end``, from ``revision`` on. ``notify``: say now and then
    that there are none.
    """
    create = (_sized(1, key), _bytes(2, end), _integer(3, revision), _integer(4, notify), _integer(7, watch_id))
    return _sized(1, b"".join(create))


def watch_cancel(watch_id: int) -> bytes:
    """WatchRequest."""
    return _sized(2, _integer(1, watch_id))


WATCH_PROGRESS: Final = _sized(3, b"")
"""WatchRequest: say up to which revision all changes were shown"""


# -- read ---------------------------------------------------------------------------------------------


def _number(found: dict[int, int | bytes], number: int) -> int:
    """A field of 64 bits with a sign."""
    value = found.get(number, 0)
    if isinstance(value, bytes):
        raise NoMessage("bytes where a number belongs")
    return value - (1 << 64) if value >> 63 else value


def _part(found: dict[int, int | bytes], number: int) -> bytes:
    value = found.get(number, b"")
    if isinstance(value, int):
        raise NoMessage("a number where bytes belong")
    return value


def _parts(data: bytes, number: int) -> list[bytes]:
    """A field that may be there many times."""
    return [value for other, value in fields(data) if other == number and isinstance(value, bytes)]


def _revision(found: dict[int, int | bytes]) -> int:
    """Of an answer's header."""
    return _number(dict(fields(_part(found, 1))), 3)


class KeyValue(NamedTuple):
    key: bytes
    value: bytes
    mod_revision: int

    @classmethod
    def parse(cls, data: bytes) -> KeyValue:
        found = dict(fields(data))
        return cls(_part(found, 1), _part(found, 5), _number(found, 3))


@dataclass(slots=True)
class EtcdAnswer:
    """Base of all answers."""

    revision: int
    """of the store when it was given; 0 inside of other answers"""

    @classmethod
    def parse(cls, data: bytes) -> EtcdAnswer:
        return EtcdAnswer(_revision(dict(fields(data))))


@dataclass(slots=True)
class RangeAnswer(EtcdAnswer):
    kvs: list[KeyValue]
    more: bool

    @classmethod
    def parse(cls, data: bytes) -> RangeAnswer:
        found = dict(fields(data))
        return cls(_revision(found), [*map(KeyValue.parse, _parts(data, 2))], found.get(3) == 1)


@dataclass(slots=True)
class TransactionAnswer(EtcdAnswer):
    succeeded: bool
    operations: list[bytes]
    """of each operation, a ResponseOp"""

    @classmethod
    def parse(cls, data: bytes) -> TransactionAnswer:
        found = dict(fields(data))
        return cls(_revision(found), found.get(2) == 1, _parts(data, 3))

    def row(self, index: int) -> KeyValue | None:
        """What the operation at this place, of `get_operation`, found: one key at the most."""
        found = dict(fields(_part(dict(fields(self.operations[index])), 1)))
        return KeyValue.parse(_part(found, 2)) if 2 in found else None

    def inner(self, index: int) -> TransactionAnswer:
        """Of the operation at this place, of `transaction_operation`."""
        return TransactionAnswer.parse(_part(dict(fields(self.operations[index])), 4))


def first_value(operation: bytes) -> bytes | None:
    """What a ResponseOp shows: of a get the value, of a put the former one, of a transaction its operation's."""
    for kind, response in dict(fields(operation)).items():
        found = dict(fields(response)) if isinstance(response, bytes) else {}
        number = 3 if kind == 4 else 2
        if number in found:
            shown = _part(found, number)
            return first_value(shown) if kind == 4 else _part(dict(fields(shown)), 5)
    return None


@dataclass(slots=True)
class LoginAnswer(EtcdAnswer):
    token: str

    @classmethod
    def parse(cls, data: bytes) -> LoginAnswer:
        found = dict(fields(data))
        return cls(_revision(found), _part(found, 2).decode(errors="replace"))


@dataclass(slots=True)
class LeaseAnswer(EtcdAnswer):
    lease_id: int
    ttl: int
    """seconds; 0 or less: it is gone"""

    @classmethod
    def parse(cls, data: bytes) -> LeaseAnswer:
        found = dict(fields(data))
        return cls(_revision(found), _number(found, 2), _number(found, 3))


@dataclass(slots=True)
class StatusAnswer(EtcdAnswer):
    version: tuple[int, ...]
    """of the member's program"""

    @classmethod
    def parse(cls, data: bytes) -> StatusAnswer:
        found = dict(fields(data))
        numbers = _part(found, 2).partition(b"-")[0].split(b".")
        return cls(_revision(found), tuple(int(number) for number in numbers if number.isdigit()))


class Event(NamedTuple):
    kv: KeyValue
    is_delete: bool

    @classmethod
    def parse(cls, data: bytes) -> Event:
        found = dict(fields(data))
        return cls(KeyValue.parse(_part(found, 2)), found.get(1) == 1)


@dataclass(slots=True)
class WatchAnswer(EtcdAnswer):
    watch_id: int
    created: bool
    canceled: bool
    compact_revision: int
    cancel_reason: str
    events: list[Event]

    @classmethod
    def parse(cls, data: bytes) -> WatchAnswer:
        found = dict(fields(data))
        return cls(
            _revision(found),
            _number(found, 2),
            found.get(3) == 1,
            found.get(4) == 1,
            _number(found, 5),
            _part(found, 6).decode(errors="replace"),
            [*map(Event.parse, _parts(data, 11))],
        )


def prefix_end(prefix: bytes) -> bytes:
    """The first key after all that start with ``prefix``, which has a byte below 0xff."""
    stem = prefix.rstrip(b"\xff")
    return stem[:-1] + bytes([stem[-1] + 1])
