"""What engines import: `connect` to a mount, move bytes through rings of shared memory, keep blocks by key.

    with connect("/mnt/kv") as client, client.iov(1 << 20) as iov, client.ring() as ring:
        file = client.file("/mnt/kv/weights", "r")
        ring.prep_read(iov, 0, file, offset=0, length=1 << 20)
        ring.submit()
        (done,) = ring.wait()

`docs/usrbio.md` says which call to use when. A client may be used from many threads, a ring from one at a time.
After a fork the child makes a client of its own.
"""

from __future__ import annotations

from kvfuse.errors import DeviceError, Disconnected
from kvfuse.keys import file_name, key_of
from kvfuse.usrbio.client.block_store import BlockStore
from kvfuse.usrbio.client.client import Client, connect
from kvfuse.usrbio.client.files import File, Namespace
from kvfuse.usrbio.client.following import Follower, News
from kvfuse.usrbio.client.gpu.gpu_memory import GpuIov, GpuRange
from kvfuse.usrbio.client.gpu.ways import Way
from kvfuse.usrbio.client.iov import Iov
from kvfuse.usrbio.client.ring import Ring
from kvfuse.usrbio.protocol.costs import Costs, Tier, decode_costs
from kvfuse.usrbio.protocol.wire import CQE, NO_HINTS, TTL_MAX, Flag, NewsKind, Op, Priority, PutHints

__all__ = [
    "CQE",
    "NO_HINTS",
    "TTL_MAX",
    "BlockStore",
    "Client",
    "Costs",
    "DeviceError",
    "Disconnected",
    "File",
    "Flag",
    "Follower",
    "GpuIov",
    "GpuRange",
    "Iov",
    "Namespace",
    "News",
    "NewsKind",
    "Op",
    "Priority",
    "PutHints",
    "Ring",
    "Tier",
    "Way",
    "connect",
    "decode_costs",
    "file_name",
    "key_of",
]
