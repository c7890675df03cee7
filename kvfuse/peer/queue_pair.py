"""Reads out of the memory of another host: one reliable queue pair, and the completions of what it was to read.

The rows of a read are posted as one list, of which only the last READ asks for a completion. READs complete in their
order, so that one says that all are whole. A READ that fails reports itself, nothing behind it is carried out, and the
queue pair is destroyed: a new one is needed, on both sides. Destroying it is also what ends READs under way: after
`read` has returned or raised, none of it will ever write to this host's memory.
"""

from __future__ import annotations

import functools
import os
import socket
import struct
from collections import Counter, deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import trio

from kvfuse.peer.peer_wire import WireError
from kvfuse.peer.verbs import RdmaDevice, VerbsError, failure, pyverbs

READ = np.dtype([("remote", "<u8"), ("local", "<u8"), ("length", "<u4"), ("rkey", "<u4"), ("lkey", "<u4")])
"""one READ: from where, to where, bytes, and the keys of both"""
Reads = npt.NDArray[np.void]
Range = tuple[int, int, int]
"""address, bytes, key"""

PLACE = struct.Struct("<B B B B I I H 2x 16s")
"""format, MTU, READs at a time, is it InfiniBand; number of the queue pair, of its first packet, LID, GID"""
PLACE_FORMAT = 1
PLACE_SIZE = PLACE.size
NO_PLACE = bytes(PLACE_SIZE)
"""of a host that does not read by RDMA here"""
POLLED = 64
"""completions that one call takes"""
POSTED = 256
"""READs that one call posts, in about a millisecond: its requests are made one by one"""
SOFTWARE_POST_BYTES = 64 << 10
"""that devices without hardware are given by one call, as they carry it out within the call"""


NEIGHBOURS = Path("/proc/net/arp")
IPV4_MAPPED = bytes(10) + b"\xff\xff"
DISCARD_PORT = 9
RESOLVE_SECONDS = 1.0


@dataclass(frozen=True)
class QueuePairOptions:
    """How a queue pair is made. ``depth``: READs that are posted at a time."""

    depth: int = 256
    parallel_reads: int = 16
    """that the other side carries out at a time (max_rd_atomic)"""
    timeout: int = 14
    """4.096 us * 2 ** timeout until a packet is sent again; 14: 67 ms"""
    retries: int = 5
    mtu: int = 5
    """as a constant: 1 (256 bytes) to 5 (4096 bytes); what both ports can do is the limit"""
    traffic_class: int = 0


LARGE_BLOCKS = QueuePairOptions()
SMALL_BLOCKS = QueuePairOptions(depth=1024, timeout=12)


class ReadOutcome(NamedTuple):
    """Of a read: the first ``whole`` rows have come, the others have not, or not all of their bytes."""

    whole: int
    status: str
    """"" for success, else the name of what went wrong, as verbs have it: REM_ACCESS_ERR, RETRY_EXC_ERR, ..."""


@dataclass
class QueuePairCounters:
    """``completions``: that were taken, errors included; ``posts``: calls with a list of READs."""

    reads: int = 0
    bytes: int = 0
    batches: int = 0
    posts: int = 0
    completions: int = 0


class _Batch:
    """Rows posted by one `read`, the completion of whose last one was asked for."""

    __slots__ = ("count", "first", "outcome")

    def __init__(self, first: int, count: int) -> None:
        self.first, self.count = first, count
        self.outcome: ReadOutcome | None = None


class QueuePair:
    """One end of a connection, made for one use: it ends with `close`, or with the first READ that fails."""

    def __init__(self, device: RdmaDevice, options: QueuePairOptions = LARGE_BLOCKS) -> None:
        """VerbsError."""
        self.device = device
        self.options = replace(options, depth=min(options.depth, device.depth_max))
        self.counters = QueuePairCounters()
        self.errors: Counter[str] = Counter()
        """READs that failed, by status"""
        self.ended = ""
        """why it can be used no more"""
        self._packet = int.from_bytes(os.urandom(3), "little")
        self._posting, self._polling = trio.Lock(), trio.Lock()
        self._under_way: deque[_Batch] = deque()
        self._posted = 0
        """READs since it was made: the next one's number"""
        self._taken = 0
        """READs that are complete"""
        verbs = pyverbs()
        try:
            with device.calls.timed("make"):
                self._open()
        except verbs.pyverbs_error.PyverbsError as error:
            raise failure(f"no queue pair of {device.info}", error) from error

    def _open(self) -> None:
        verbs, context = pyverbs(), self.device.context
        expected = _next_descriptor()
        self._channel = verbs.cq.CompChannel(context)
        self._descriptor = _descriptor_of(self._channel, expected)
        os.set_blocking(self._descriptor, False)
        self._completions = verbs.cq.CQ(context, self.options.depth + 1, None, self._channel, 0)
        self._completions.req_notify()
        capacity = verbs.qp.QPCap(max_send_wr=self.options.depth, max_recv_wr=1, max_send_sge=1, max_recv_sge=1)
        self._pair = verbs.qp.QP(
            self.device.domain,
            verbs.qp.QPInitAttr(
                qp_type=verbs.IBV_QPT_RC, scq=self._completions, rcq=self._completions, cap=capacity, sq_sig_all=0
            ),
        )
        attributes = verbs.qp.QPAttr(port_num=self.device.info.port)
        attributes.qp_access_flags = verbs.IBV_ACCESS_REMOTE_READ
        self._pair.to_init(attributes)
        _DESCRIPTORS.add(self._descriptor)

    # -- connecting ----------------------------------------------------------------------------------

    @property
    def place(self) -> bytes:
        """Where the other side finds this one: for its `connect`."""
        device = self.device
        return PLACE.pack(
            PLACE_FORMAT,
            min(self.options.mtu, device.mtu),
            min(self.options.parallel_reads, device.reads_max),
            device.info.link_layer == "InfiniBand",
            self._pair.qp_num,
            self._packet,
            device.lid,
            device.gid.octets,
        )

    async def connect(self, place: bytes) -> None:
        """To what the other side has as its `place`, and it to this one's. WireError, VerbsError."""
        verbs = pyverbs()
        try:
            form, mtu, parallel, is_infiniband, number, packet, lid, gid = PLACE.unpack(place)
        except struct.error as error:
            raise WireError(f"the place of a queue pair has {len(place)} bytes") from error
        if form != PLACE_FORMAT or not 1 <= mtu <= 5 or not parallel or max(number, packet) >= 1 << 24 or not any(gid):
            raise WireError("the place of a queue pair is none")
        device, options = self.device, self.options
        if bool(is_infiniband) != (device.info.link_layer == "InfiniBand"):
            raise WireError("one of two RDMA devices is InfiniBand, the other is Ethernet")
        if not is_infiniband:
            await _resolve(gid)
        attributes = verbs.qp.QPAttr(port_num=device.info.port)
        route = verbs.addr.GlobalRoute(
            dgid=verbs.addr.GID(_colons(gid)),
            sgid_index=device.gid.number,
            hop_limit=64,
            traffic_class=options.traffic_class,
        )
        attributes.ah_attr = verbs.addr.AHAttr(gr=route, is_global=1, port_num=device.info.port, dlid=lid)
        attributes.qp_access_flags = verbs.IBV_ACCESS_REMOTE_READ
        attributes.path_mtu = min(mtu, options.mtu, device.mtu)
        attributes.max_rd_atomic = attributes.max_dest_rd_atomic = min(
            parallel, options.parallel_reads, device.reads_max
        )
        attributes.dest_qp_num, attributes.rq_psn, attributes.sq_psn = number, packet, self._packet
        attributes.min_rnr_timer, attributes.rnr_retry = 12, 7
        attributes.timeout, attributes.retry_cnt = options.timeout, options.retries
        try:
            with device.calls.timed("connect"):
                self._pair.to_rts(attributes)
        except verbs.pyverbs_error.PyverbsError as error:
            raise failure(f"queue pair of {device.info}: no connection", error) from error

    # -- reading -------------------------------------------------------------------------------------

    async def read(self, rows: Reads) -> ReadOutcome:
        """Carry out READs: the rows' order is the order in which they arrive. Any number of tasks may read at a time.

        A cancelled read ends the queue pair, for all who read by it, unless nothing of it was posted. When this has
        returned or raised, nothing more of these rows will be written to this host's memory.
        """
        batches: list[_Batch] = []
        try:
            async with self._posting:
                for start in range(0, len(rows), self.options.depth):
                    part = rows[start : start + self.options.depth]
                    await self._until(functools.partial(self._has_room, len(part)))
                    if self.ended:
                        break
                    batches.append(_Batch(self._posted, len(part)))
                    self._under_way.append(batches[-1])
                    await self._post(part)
            await self._until(lambda: not batches or batches[-1].outcome is not None)
        except BaseException:
            if batches:
                self.end("CANCELLED")
            raise
        whole = 0
        for batch in batches:
            assert batch.outcome is not None
            whole += batch.outcome.whole
            if batch.outcome.status:
                return ReadOutcome(whole, batch.outcome.status)
        return ReadOutcome(whole, "" if whole == len(rows) else self.ended)

    def _has_room(self, count: int) -> bool:
        return self._posted - self._taken + count <= self.options.depth

    async def _post(self, rows: Reads) -> None:
        """As one list; where a device would keep this thread for long by that, as several, with turns for others."""
        step = POSTED
        if self.device.is_software:
            step = max(1, min(step, SOFTWARE_POST_BYTES // max(1, int(rows["length"].max()))))
        for start in range(0, len(rows), step):
            if self.ended:
                return
            if start:
                await trio.lowlevel.checkpoint()
            with self.device.calls.timed("post"):
                self._post_list(rows[start : start + step], is_last=start + step >= len(rows))

    def _post_list(self, rows: Reads, *, is_last: bool) -> None:
        verbs = pyverbs()
        flags = verbs.IBV_SEND_SIGNALED if is_last else 0
        requests: list[Any] = []  # from the last one; nothing else keeps them alive until they are posted
        number = self._posted + len(rows)
        for row in reversed(rows.tolist()):
            number -= 1
            piece = verbs.wr.SGE(row[1], row[2], row[4])
            request = verbs.wr.SendWR(
                wr_id=number, opcode=verbs.IBV_WR_RDMA_READ, num_sge=1, sg=[piece], send_flags=flags
            )
            request.set_wr_rdma(row[3], row[0])
            if requests:
                request.next_wr = requests[-1]
            requests.append(request)
            flags = 0
        self._posted += len(rows)
        counters = self.counters
        counters.reads += len(rows)
        counters.bytes += int(rows["length"].sum(dtype=np.int64))
        counters.posts += 1
        counters.batches += is_last
        try:
            self._pair.post_send(requests[-1])
        except verbs.pyverbs_error.PyverbsError as error:
            self.end(str(failure("post", error)))

    async def _until(self, is_so: Callable[[], bool]) -> None:
        """Take completions until something is so, or the queue pair has ended. One task does it for all who wait.

        Batches end in the order in which they were posted, and tasks wait for the lock in that order, too.
        """
        async with self._polling:
            while not self.ended and not is_so():
                if not self._take():
                    self._completions.req_notify()
                    if not self._take():  # what came before that rings no bell
                        await self._hear()

    async def _hear(self) -> None:
        """Wait for an event, and take it off the channel: it must be acknowledged before its queue can be destroyed."""
        verbs = pyverbs()
        try:
            await trio.lowlevel.wait_readable(self._descriptor)
            if self.ended:
                return
            self._channel.get_cq_event(self._completions)
        except trio.ClosedResourceError:
            return  # the queue pair ended meanwhile
        except verbs.pyverbs_error.PyverbsRDMAError:
            return  # EAGAIN: it was not there
        self._completions.ack_events(1)

    def _take(self) -> bool:
        """Completions that are there. False: none was."""
        with self.device.calls.timed("poll"):
            count, completions = self._completions.poll(POLLED)
        for completion in completions[:count]:
            self.counters.completions += 1
            if self.ended:
                continue  # flushed: behind one that failed
            if completion.status:
                self._fail(int(completion.wr_id), _status_name(completion.status))
            else:
                self._succeed(int(completion.wr_id))
        return bool(count)

    def _succeed(self, number: int) -> None:
        self._taken = number + 1
        while self._under_way and self._under_way[0].first + self._under_way[0].count <= self._taken:
            batch = self._under_way.popleft()
            batch.outcome = ReadOutcome(batch.count, "")

    def _fail(self, number: int, status: str) -> None:
        """A READ failed: those before it are whole."""
        self._succeed(number - 1)
        if self._under_way:
            batch = self._under_way.popleft()
            batch.outcome = ReadOutcome(number - batch.first, status)
        self.end(status)

    # -- the end -------------------------------------------------------------------------------------

    def end(self, why: str) -> None:
        """Destroy the queue pair: from now on nothing is written to this host's memory by it. Again does no harm."""
        if self.ended:
            return
        self.ended = why
        if why != "CLOSED" or self._under_way:
            self.errors[why] += 1
        for batch in self._under_way:
            batch.outcome = ReadOutcome(0, why)
        self._under_way.clear()
        trio.lowlevel.notify_closing(self._descriptor)
        with self.device.calls.timed("end"):
            self._pair.close()
        while self._take():
            pass

    def close(self) -> None:
        """Whoever still reads gets an outcome with the status CLOSED. For the event loop; again does no harm."""
        self.end("CLOSED")
        if self._descriptor >= 0:
            _DESCRIPTORS.remove(self._descriptor)
            self._descriptor = -1
            self._completions.close()
            self._channel.close()


async def _resolve(gid: bytes, table: Path = NEIGHBOURS) -> None:
    """Have the kernel find out the link address of another host: connecting does, and keeps its thread for that long.

    VerbsError if the host does not answer. Only for IPv4, and for hosts of the same link; others have none.
    """
    if not gid.startswith(IPV4_MAPPED):
        await trio.lowlevel.checkpoint()
        return
    address = socket.inet_ntoa(gid[12:])
    # If there is no way to it, connecting says so.
    with trio.socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender, suppress(OSError):
        await sender.sendto(b"", (address, DISCARD_PORT))
    with trio.move_on_after(RESOLVE_SECONDS):
        while _is_unresolved(address, table):  # noqa: ASYNC110  # the kernel tells nobody
            await trio.sleep(0.002)
        return
    raise VerbsError(f"no host on this link answers for {address}")


def _is_unresolved(address: str, table: Path) -> bool:
    """The kernel asks for its link address, and has no answer."""
    lines = [line.split() for line in table.read_text().splitlines()[1:]]
    return any(line[0] == address and int(line[2], 16) == 0 for line in lines)


_DESCRIPTORS: set[int] = set()
"""of the completion channels of all queue pairs"""


def join(remote: Iterable[Range], local: Iterable[Range]) -> list[tuple[int, int, int, int, int]]:
    """Rows of `READ` from ranges to ranges of as many bytes in all: one for what is in one piece on both sides."""
    rows = []
    left = list(local)[::-1]
    for source, size, rkey in remote:
        while size:
            target, room, lkey = left.pop()
            length = min(size, room)
            rows.append((source, target, length, rkey, lkey))
            if length < room:
                left.append((target + length, room - length, lkey))
            source, size = source + length, size - length
    return rows


def _next_descriptor() -> int:
    """That the next thing to be opened gets, if no other thread is faster."""
    number = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    os.close(number)
    return number


def _descriptor_of(channel: Any, expected: int) -> int:
    """Of a completion channel that was just opened. Version 44 of pyverbs does not tell."""
    told: int | None = getattr(channel, "fd", None)
    if told is not None:
        return told
    if expected not in _DESCRIPTORS and _is_channel(str(expected)):
        return expected
    return next(
        int(name) for name in os.listdir("/proc/self/fd") if int(name) not in _DESCRIPTORS and _is_channel(name)
    )


def _is_channel(name: str) -> bool:
    try:
        return "infinibandevent" in os.readlink(f"/proc/self/fd/{name}")
    except FileNotFoundError:  # the descriptor by which they are listed is closed by now
        return False


def _status_name(status: Any) -> str:
    verbs = vars(pyverbs())
    return next(
        (name.removeprefix("IBV_WC_") for name, value in verbs.items() if _is_status(name) and value == status),
        f"status {int(status)}",
    )


def _is_status(name: str) -> bool:
    return name.startswith("IBV_WC_") and name.endswith("_ERR")


def gid_of(place: bytes) -> bytes:
    """The address in a place."""
    return place[-16:]


def _colons(gid: bytes) -> str:
    return ":".join(gid[place : place + 2].hex() for place in range(0, 16, 2))
