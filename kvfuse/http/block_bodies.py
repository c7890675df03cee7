"""The body of many blocks, ``application/vnd.kvfuse.blocks``: the one place that says how its bytes lie. Little endian.

======================  ==========================================================================================
16 bytes                magic ``KVB1``, u32 number of items, u64 zero
16 bytes for each item  u64 bytes of the block, i32 status, u32 bytes of the key
keys                    of all items, one behind the other
blocks                  of all items, one behind the other
======================  ==========================================================================================

A request to look for keys, or to get, delete or prefetch them, has keys and no blocks; one to put has both. An answer
has no keys: its items are those of the request, in that order. Status 0: the block is there, or was stored or removed;
else it is an errno of Linux: 2 (ENOENT), there is no such block; 13 (EACCES), the user may not read it. Blocks of items
with another status than 0 have no bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvfuse.http.web_message import WebError
from kvfuse.keys import KEY_SIZE_MAX

CONTENT_TYPE = "application/vnd.kvfuse.blocks"
MAGIC = b"KVB1"
HEAD = np.dtype([("magic", "S4"), ("count", "<u4"), ("zero", "<u8")])
ITEM = np.dtype([("size", "<u8"), ("status", "<i4"), ("key_size", "<u4")])
KEYS_MAX = 16_384
"""items of one body"""
KEY_BODY_MAX = HEAD.itemsize + KEYS_MAX * (ITEM.itemsize + KEY_SIZE_MAX)
"""bytes of a body without blocks"""
assert HEAD.itemsize == 16
assert ITEM.itemsize == 16


def parse_body(body: bytes) -> tuple[list[bytes], list[memoryview]]:
    """(keys, blocks) of a request. WebError 400."""
    if len(body) < HEAD.itemsize:
        raise WebError(400, f"the body has {len(body)} bytes, less than its head of {HEAD.itemsize}")
    head = np.frombuffer(body, HEAD, 1)[0]
    count = int(head["count"])
    if head["magic"] != MAGIC or head["zero"]:
        raise WebError(400, f"the body does not begin with {MAGIC.decode()}", f"it is to be {CONTENT_TYPE}")
    if not 1 <= count <= KEYS_MAX:
        raise WebError(400, f"the body has {count} items: 1 to {KEYS_MAX} are taken")
    start = HEAD.itemsize + count * ITEM.itemsize
    if len(body) < start:
        raise WebError(400, f"the body ends amid its {count} items")
    items = np.frombuffer(body, ITEM, count, HEAD.itemsize)
    key_sizes, sizes = items["key_size"].astype(np.int64), items["size"]
    if key_sizes.min() < 1 or key_sizes.max() > KEY_SIZE_MAX:
        raise WebError(400, f"a key has 1 to {KEY_SIZE_MAX} bytes")
    if sizes.max() > len(body):
        raise WebError(400, "a block is longer than the body")
    total = start + int(key_sizes.sum()) + int(sizes.astype(np.int64).sum())
    if total != len(body):
        raise WebError(400, f"the body has {len(body)} bytes, and its items {total}")
    view, keys, blocks = memoryview(body), list[bytes](), list[memoryview]()
    for size in key_sizes.tolist():
        keys.append(body[start : start + size])
        start += size
    for size in sizes.tolist():
        blocks.append(view[start : start + size])
        start += size
    return keys, blocks


def build_head(statuses: Sequence[int] | npt.NDArray[np.int64], sizes: npt.ArrayLike = 0) -> bytes:
    """All of an answer but its blocks."""
    head, items = np.zeros(1, HEAD), np.zeros(len(statuses), ITEM)
    head["magic"], head["count"] = MAGIC, len(statuses)
    items["status"], items["size"] = statuses, sizes
    return head.tobytes() + items.tobytes()


def build_body(keys: Sequence[bytes], blocks: Sequence[bytes] = ()) -> bytes:
    """A request."""
    head, items = np.zeros(1, HEAD), np.zeros(len(keys), ITEM)
    head["magic"], head["count"] = MAGIC, len(keys)
    items["key_size"] = [len(key) for key in keys]
    if blocks:
        items["size"] = [len(block) for block in blocks]
    return b"".join((head.tobytes(), items.tobytes(), *keys, *blocks))
