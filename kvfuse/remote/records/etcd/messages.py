"""Messages of etcd's v3 JSON gateway, as structs: what this engine sends, and what it reads of the answers.

The gateway writes keys and values in base64 (as msgspec does with ``bytes``), 64-bit integers as strings, and leaves
out what is zero, empty or false. Field names are those of etcd's rpc.proto. An answer is decoded into
these types or not at all.
"""

from __future__ import annotations

from typing import Final, TypeVar

from msgspec import Struct, field
from msgspec.json import Decoder, Encoder

encode: Final = Encoder().encode

_A = TypeVar("_A")


class EtcdMessage(Struct, omit_defaults=True):
    """Base of what is sent: what has its default is left out."""


# -- sent ---------------------------------------------------------------------------------------------


class Range(EtcdMessage):
    key: bytes
    range_end: bytes = b""
    limit: int = 0
    revision: int = 0
    """0: the present"""
    keys_only: bool = False


class Put(EtcdMessage):
    key: bytes
    value: bytes
    lease: int = 0
    prev_kv: bool = False
    """the answer has what was there"""


class DeleteRange(EtcdMessage):
    key: bytes


class Compare(EtcdMessage, tag_field="target", tag="MOD"):
    """The key was changed last at this revision; 0: it is absent. ("EQUAL" is the default of ``result``.)"""

    key: bytes
    mod_revision: int


class CompareValue(EtcdMessage, tag_field="target", tag="VALUE"):
    """The key's value is GREATER or LESS than this one. Neither holds of an absent key."""

    key: bytes
    value: bytes
    result: str


class TxnOperation(EtcdMessage):
    """One of them."""

    request_range: Range | None = None
    request_put: Put | None = None
    request_delete_range: DeleteRange | None = None
    request_txn: TxnMessage | None = None


class TxnMessage(EtcdMessage):
    compare: list[Compare | CompareValue] = []
    success: list[TxnOperation] = []
    failure: list[TxnOperation] = []


class Login(EtcdMessage):
    name: str
    password: str


class LeaseGrant(EtcdMessage):
    TTL: int


class LeaseCall(EtcdMessage):
    """Revoke or keep alive."""

    ID: int


class WatchCreate(EtcdMessage):
    key: bytes
    range_end: bytes
    start_revision: int
    progress_notify: bool = False


class WatchCall(EtcdMessage):
    create_request: WatchCreate


# -- read ---------------------------------------------------------------------------------------------


class Header(Struct):
    revision: int = 0


class EtcdAnswer(Struct):
    """Base of all answers. ``revision`` is the store's when it was given; 0 inside of other answers."""

    header: Header = field(default_factory=Header)


class KeyValue(Struct):
    key: bytes
    mod_revision: int
    value: bytes = b""


class RangeAnswer(EtcdAnswer):
    kvs: list[KeyValue] = []
    more: bool = False


class PutAnswer(EtcdAnswer):
    prev_kv: KeyValue | None = None


class OperationAnswer(Struct):
    response_range: RangeAnswer | None = None
    response_put: PutAnswer | None = None
    response_txn: TransactionAnswer | None = None


class TransactionAnswer(EtcdAnswer):
    succeeded: bool = False
    responses: list[OperationAnswer] = []


class LoginAnswer(EtcdAnswer, kw_only=True):
    token: str


class LeaseAnswer(EtcdAnswer):
    ID: int = 0
    TTL: int = 0


class StreamError(Struct):
    """How a stream ends that fails after it began."""

    message: str = ""
    grpc_code: int = 0


class KeepaliveAnswer(EtcdAnswer):
    result: LeaseAnswer | None = None
    error: StreamError | None = None


class Event(Struct):
    kv: KeyValue
    type: str = "PUT"


class WatchResult(EtcdAnswer):
    created: bool = False
    canceled: bool = False
    compact_revision: int = 0
    cancel_reason: str = ""
    events: list[Event] = []


class WatchAnswer(Struct):
    result: WatchResult | None = None
    error: StreamError | None = None


class Refusal(Struct):
    """The body beside a status other than 200; ``error`` is an object where the answer would be a stream."""

    code: int = 0
    """of gRPC"""
    message: str = ""
    error: str | StreamError = ""


def _decoder(answer_type: type[_A]) -> Decoder[_A]:
    return Decoder(answer_type, strict=False)  # integers come as strings


ANSWER: Final = _decoder(EtcdAnswer)
RANGE: Final = _decoder(RangeAnswer)
TRANSACTION: Final = _decoder(TransactionAnswer)
LOGIN: Final = _decoder(LoginAnswer)
LEASE: Final = _decoder(LeaseAnswer)
KEEPALIVE: Final = _decoder(KeepaliveAnswer)
WATCH: Final = _decoder(WatchAnswer)
REFUSAL: Final = _decoder(Refusal)


def prefix_end(prefix: bytes) -> bytes:
    """The first key after all that start with ``prefix``, which has a byte below 0xff."""
    stem = prefix.rstrip(b"\xff")
    return stem[:-1] + bytes([stem[-1] + 1])
