"""Weighs a call among those of its user that wait in the event loop: see `call_memory.UnderWay`."""

from __future__ import annotations

from kvfuse.usrbio.daemon.call import Call
from kvfuse.usrbio.protocol.wire import Op

WEIGHTS: dict[int, int] = {Op.READ: 1, Op.GET: 1, Op.WRITE: 1, Op.FSYNC: 4, Op.CANCEL: 0}
"""weights of calls that wait: see `weight_of`"""
PUT_WEIGHT = 2
KEYS_WEIGHT_MAX = 32
EXISTS_WEIGHT_MAX = 128
KEYS_PER_WEIGHT = 64


def weight_of(call: Call) -> int:
    """About how many tasks of a call may continue at once in the event loop. 0: it does not wait there, or briefly."""
    op, count = call.entry.op, call.entry.length
    if op == Op.PUT:
        return PUT_WEIGHT if call.namespace is not None and call.namespace.waits else 0
    if op in (Op.DELETE, Op.PREFETCH):
        return min(max(1, count), KEYS_WEIGHT_MAX)
    if op == Op.EXISTS:
        return min(1 + count // KEYS_PER_WEIGHT, EXISTS_WEIGHT_MAX)
    return WEIGHTS[op]
