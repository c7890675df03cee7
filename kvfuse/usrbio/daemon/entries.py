"""Serves submissions in a ring's thread: checks them, reads by itself, makes calls of the rest.

Entries are copies of what the client wrote, and the daemon trusts nothing in them: it finds the handles of a call, and
checks that its ranges lie in their iov or in the aux area.
"""

from __future__ import annotations

import errno
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kvfuse.keys import KEY_SIZE_MAX, file_name, file_names
from kvfuse.usrbio.daemon import ring_reads
from kvfuse.usrbio.daemon.batch_finder import BatchFinder
from kvfuse.usrbio.daemon.call import PIECE, Call, Completion, Entry, RefusedEntry, ServedRing, Short
from kvfuse.usrbio.daemon.client_memory import SMALL, Bytes, MappedIov
from kvfuse.usrbio.daemon.client_registry import ClientRegistry
from kvfuse.usrbio.daemon.columns import (
    COLUMNS_MIN,
    OFFSET_MAX,
    ColumnReads,
    find_overlaps,
    may_overlap,
)
from kvfuse.usrbio.daemon.device_calls import check_range, find_block
from kvfuse.usrbio.daemon.device_iovs import DeviceIov
from kvfuse.usrbio.daemon.lines import Lines
from kvfuse.usrbio.daemon.penalty import MALFORMED
from kvfuse.usrbio.daemon.put_batches import CALL_SIZE
from kvfuse.usrbio.daemon.put_finder import PUTS_SIZE
from kvfuse.usrbio.daemon.registered_things import NamespaceHandle
from kvfuse.usrbio.daemon.row_ops import RowOps
from kvfuse.usrbio.daemon.weights import weight_of
from kvfuse.usrbio.protocol.queues import Entries
from kvfuse.usrbio.protocol.wire import (
    FILE_OPS,
    HINT_BITS,
    KEYS_MAX,
    LENGTH_MAX,
    SQE,
    SQE_STRUCT,
    Flag,
    Op,
    Priority,
    unpack_keys,
)
from kvfuse.volume.measures.measures import Histogram
from kvfuse.volume.views.content_map import ContentMap

T = TypeVar("T")

LARGE = 256 << 10
"""Bytes of an operation from which it does not wait for those behind it."""
NAMES_PER_TURN = 1024
"""Keys that are unpacked before other rings may work."""
KEY_SIZE = 100
"""Bytes that a key takes beside its own, about."""
OPS = frozenset(map(int, Op))
_VIEW = int(Flag.VIEW)  # plain numbers: arithmetic with flags is slow
_OF_KEYS = int(Flag.PREFIX | Flag.COSTS | Flag.NEAR)


def _is_late(entry: Entry, taken_at: float) -> bool:
    return entry.timeout_us != 0 and time.monotonic() > taken_at + entry.timeout_us / 1e6


def _measure(served: dict[Histogram, int], seconds: float) -> None:
    """Count operations of a batch that took ``seconds``, and clear them."""
    for times, count in served.items():
        times.counts[bisect_left(times.bounds, seconds)] += count
        times.sum += count * seconds
    served.clear()


def _cut_aux(aux: Bytes, offset: int, length: int) -> Bytes:
    if length > len(aux) or offset > len(aux) - length:
        raise RefusedEntry(errno.EINVAL)
    return aux[offset : offset + length]


def _note_uses(asked: dict[NamespaceHandle, list[bytes]]) -> None:
    """Note the names with their caches, and clear them."""
    for namespace, names in asked.items():
        if namespace.uses is not None:
            namespace.uses.note(namespace.ino, names)
    asked.clear()


class EntryServer:
    """Serves the entries of one ring, whose thread owns it. ``op_mask``: bit n allows operation n."""

    def __init__(self, ring: ServedRing, registered: ClientRegistry, aux: npt.NDArray[np.uint8], op_mask: int) -> None:
        self._ring = ring
        self._registered = registered
        self._aux_area = aux
        self._op_mask = op_mask
        self._turns = ring.turns
        self._completions = ring.completions
        self.lines = Lines(self.serve)
        """entries that were taken and wait"""
        self._columns = ColumnReads(ring, registered)
        self._batches = BatchFinder(ring, registered, aux, op_mask)
        self._rows = RowOps(ring, registered, aux, op_mask)
        self._asked: dict[NamespaceHandle, list[bytes]] = {}
        """names of blocks of caches that the present batch asks for"""
        self._served: dict[Histogram, int] = {}
        """histogram -> reads and gets of the present batch"""
        self.count = 0
        """entries served since somebody set it to 0"""
        self.bad_count = 0
        """malformed ones among them"""
        self._is_lone = False
        """the present entry has no place"""

    def close(self) -> None:
        """Drop memory: the garbage collector frees the rest, as the ring's thread and this refer to each other."""
        self._aux_area = self._aux_area[:0].copy()
        self._batches.close()
        self._rows.close()
        del self._columns, self._batches, self._rows

    # -- serving -------------------------------------------------------------------------------------

    def serve(self, rows: Entries, taken_at: float, *, in_place: bool = True) -> Entries:
        """Serve entries taken from the queue at ``taken_at`` (monotonic seconds). Return those that wait for memory.

        ``in_place``: writes may go straight to where the file's bytes are.
        """
        self.count += len(rows)
        rows = self._rows.serve(rows, taken_at)
        if not len(rows):
            return rows
        if len(rows) > 1 or rows["op"][0] == Op.WRITE:
            rows = self._batches.serve(rows, taken_at, in_place=in_place)
        if len(rows) >= COLUMNS_MIN:
            rows = self._refuse_overlaps(rows)
            if self._op_mask >> Op.READ & 1:
                rows = self._columns.serve(rows, taken_at)
        elif len(rows) > 1 and may_overlap(rows):
            rows = self._refuse_overlaps(rows)
        calls: list[Call] = []
        done: list[tuple[int, Completion]] = []
        waiting: list[int] = []
        short: set[int] = set()
        """operations for which there is no room now"""
        kept_size = 0
        for number, fields in enumerate(SQE_STRUCT.iter_unpack(rows.tobytes())):
            entry = Entry._make(fields)
            try:
                if entry.op in short and not _is_late(entry, taken_at):
                    raise Short
                answer = self._answer(entry, taken_at, calls)
            except Short:
                short.add(entry.op)
                waiting.append(number)
                self.count -= 1
                continue
            if answer is not None:
                done.append((entry.user_data, answer))
            kept_size += entry.length
            is_wanted = self._turns.is_wanted(self._ring.seat)
            is_put = entry.op == Op.PUT
            if kept_size >= PUTS_SIZE or (not is_put and (is_wanted or entry.length >= LARGE)):
                self._publish_and_start(done, calls)
                done, calls, kept_size = [], [], 0
            if is_wanted:
                self._turns.pause(self._ring.seat)
        self._publish_and_start(done, calls)
        if self._served:
            _measure(self._served, time.monotonic() - taken_at)
        if self._asked:
            _note_uses(self._asked)
        return rows[waiting] if waiting else rows[:0]

    def serve_one(self, packed: bytearray, taken_at: float) -> bool:
        """Take an entry that is alone in the queue, and serve it as `serve`. False: it has to wait for memory."""
        entry = Entry._make(SQE_STRUCT.unpack(packed))
        if (result := self._rows.serve_one(entry, packed, taken_at)) is not None:
            self._completions.take_lone(entry.user_data, Completion(result))
            self.count += 1
            return True
        calls: list[Call] = []
        answer, is_short, self._is_lone = None, False, True
        try:
            if entry.op != Op.WRITE:
                answer = self._answer(entry, taken_at, calls)
        except Short:
            is_short = True
        finally:
            self._is_lone = False
        if is_short or calls or entry.op == Op.WRITE:
            self._completions.take(packed, taken_at)
            if entry.op == Op.WRITE:
                return not len(self.serve(np.frombuffer(packed, SQE), taken_at))
            if is_short:
                return False
            calls[0].entry = Entry._make(SQE_STRUCT.unpack(packed))
            self._registered.start(calls)
        else:
            self._completions.take_lone(entry.user_data, answer)
        self.count += 1
        if self._served:
            _measure(self._served, time.monotonic() - taken_at)
        if self._asked:
            _note_uses(self._asked)
        return True

    def _publish_and_start(self, done: list[tuple[int, Completion]], calls: list[Call]) -> None:
        if done:
            self._completions.publish(done)
        if calls:
            self._registered.start(calls)

    def _refuse_overlaps(self, rows: Entries) -> Entries:
        """Refuse entries whose target bytes overlap those of another entry of this batch."""
        refused = find_overlaps(rows, self._registered.iovs)
        if not len(refused):
            return rows
        self.bad_count += len(refused)
        self._completions.post(rows["user_data"][refused], np.full(len(refused), -errno.EINVAL))
        return np.delete(rows, refused)

    def _answer(self, entry: Entry, taken_at: float, calls: list[Call]) -> Completion | None:
        """`_serve`, with an error as an answer. Short."""
        try:
            return self._serve(entry, taken_at, calls)
        except RefusedEntry as refusal:
            number = refusal.number
        except OSError as error:
            number = error.errno or errno.EIO
        self.bad_count += number in MALFORMED
        return Completion(-number)

    def _serve(self, entry: Entry, taken_at: float, calls: list[Call]) -> Completion | None:
        """The answer to an entry, or None: it is in ``calls``, or has no completion. Refused, OSError, Short."""
        op = entry.op
        if op == Op.RELEASE:
            self._registered.pins.give(entry.offset)
            if not self._is_lone:
                self._completions.forget_entry(entry.user_data)
            return None
        if op not in OPS or entry.reserved or entry.priority > Priority.LOW:
            raise RefusedEntry(errno.EINVAL)
        if not self._op_mask >> op & 1 and op != Op.CANCEL:
            raise RefusedEntry(errno.EPERM)
        deadline = float("inf")
        if entry.timeout_us:
            deadline = taken_at + entry.timeout_us / 1e6
            if _is_late(entry, taken_at):
                raise RefusedEntry(errno.ETIMEDOUT)
        if op == Op.GET:
            return self._serve_get(entry, deadline, calls)
        if op in FILE_OPS:
            return self._serve_file(entry, deadline, calls)
        if op == Op.CANCEL:
            return self._cancel(entry, deadline)
        calls.append(self._make_put(entry, deadline) if op == Op.PUT else self._make_keys_call(entry, deadline))
        return None

    # files

    def _serve_file(self, entry: Entry, deadline: float, calls: list[Call]) -> Completion | None:
        file = self._registered.files.get(entry.handle)
        if file is None:
            raise RefusedEntry(errno.EBADF)
        call = Call(self._ring, entry, deadline, file=file)
        if entry.op != Op.FSYNC:
            if entry.flags or entry.offset > OFFSET_MAX:
                raise RefusedEntry(errno.EINVAL)
            device = self._registered.devices.get(entry.iov) if entry.op == Op.READ else None
            if device is not None and file.readable:
                return self._read_to_device(call, device, calls)
            iov = call.iov = self._find_iov(entry)
            if not (file.readable if entry.op == Op.READ else file.writable):
                raise RefusedEntry(errno.EBADF)
            if entry.op == Op.WRITE:
                with self._reserving(call, entry.length):
                    self._copy(call, np.empty(entry.length, np.uint8), iov, iov.read)
            else:
                if not iov.writable:
                    raise RefusedEntry(errno.EACCES)
                call.again = self._try_read
                if not file.measures.limiters and (answer := self._try_read(call)) is not None:
                    times = file.measures.seconds["read"]
                    self._served[times] = self._served.get(times, 0) + 1
                    return answer
        if not call.size:
            self._reserve(call, min(entry.length, PIECE))
        calls.append(call)
        return None

    def _read(self, content: ContentMap, offset: int, length: int, iov: MappedIov, iov_offset: int) -> int:
        """`ring_reads.read`; other rings work during a large one."""
        if length <= SMALL and iov.holds_lock:
            began = time.perf_counter()
            result = ring_reads.read(content, offset, length, iov, iov_offset)
            iov.note_copy(time.perf_counter() - began)
            return result
        with self._turns.copying(self._ring.seat):
            return ring_reads.read(content, offset, length, iov, iov_offset)

    def _try_read(self, call: Call) -> Completion | None:
        """The answer to a READ; None: the event loop has to show what it reads, or to read. OSError."""
        entry, file, iov = call.entry, call.file, call.iov
        assert file is not None
        assert iov is not None
        result = self._read(file.map, entry.offset, entry.length, iov, entry.iov_offset)
        if result == ring_reads.ASK:
            return None
        if file.map.notes_reads:
            file.map.note_read()
        file.measures.read_bytes += result
        return Completion(result)

    def _find_iov(self, entry: Entry) -> MappedIov:
        """The iov of an entry, whose range lies in it."""
        iov = self._registered.iovs.get(entry.iov)
        if iov is None or entry.length > iov.size or entry.iov_offset > iov.size - entry.length:
            raise RefusedEntry(errno.EFAULT)
        if entry.length > LENGTH_MAX:
            raise RefusedEntry(errno.EINVAL)
        return iov

    def _reserve(self, call: Call, size: int) -> None:
        """Reserve ``size`` bytes for a call, and what its task takes. Short."""
        size += CALL_SIZE
        weight = weight_of(call)
        if not self._registered.share.take(size, weight, self._ring.jobs.nudge):
            raise Short
        call.size, call.weight = size, weight

    @contextmanager
    def _reserving(self, call: Call, size: int) -> Iterator[None]:
        """`_reserve`, for the body: gives it back where that fails."""
        self._reserve(call, size)
        try:
            yield
        except BaseException:
            self._registered.share.give(call.size, call.weight)
            call.size = call.weight = 0
            raise

    def _copy(self, call: Call, buffer: npt.NDArray[np.uint8], iov: MappedIov, read: Callable[[int, Bytes], T]) -> T:
        """Copy an entry's bytes, which the client may change afterwards; returns what ``read`` returns. OSError."""
        if len(buffer) <= SMALL and iov.holds_lock:
            began = time.perf_counter()
            answer = read(call.entry.iov_offset, buffer)
            iov.note_copy(time.perf_counter() - began)
        else:
            with self._turns.copying(self._ring.seat):
                answer = read(call.entry.iov_offset, buffer)
        call.data = buffer.data
        return answer

    # keys

    def _find_namespace(self, entry: Entry) -> NamespaceHandle:
        namespace = self._registered.namespaces.get(entry.handle)
        if namespace is None:
            raise RefusedEntry(errno.EBADF)
        return namespace

    def _read_name(self, entry: Entry) -> bytes:
        """The file name of the one key of an entry."""
        if not 1 <= entry.key_length <= KEY_SIZE_MAX or entry.flags & ~_VIEW:
            raise RefusedEntry(errno.EINVAL)
        return file_name(_cut_aux(self._aux_area, entry.key_offset, entry.key_length).tobytes())

    def _make_put(self, entry: Entry, deadline: float) -> Call:
        """A PUT with a copy of the bytes, unless the event loop has to allow that before. Refused, Short, OSError."""
        namespace = self._find_namespace(entry)
        name = self._read_name(entry)
        if entry.offset >> HINT_BITS:
            raise RefusedEntry(errno.EINVAL)
        iov = self._find_iov(entry)
        call = Call(self._ring, entry, deadline, namespace=namespace, names=(name,), iov=iov)
        if namespace.read_only:
            raise RefusedEntry(errno.EROFS)
        if namespace.may_copy:
            with self._reserving(call, entry.length):
                self._copy_put(call)
        else:
            call.again = self._copy_allowed
            self._reserve(call, 0)
        return call

    def _copy_put(self, call: Call) -> None:
        """Copy the bytes of a put that has memory for them, into the tier where that has room, too. OSError."""
        assert call.namespace is not None
        assert call.iov is not None
        length, iov, call.iov = call.entry.length, call.iov, None
        block = self._registered.allocate(call.namespace, length)
        buffer = np.empty(length, np.uint8) if block is None else block.buffer
        checksums = self._copy(call, buffer, iov, iov.read_checked)
        if block is not None:
            block.checksums, call.data = checksums, block

    def _serve_get(self, entry: Entry, deadline: float, calls: list[Call]) -> Completion | None:
        namespace = self._find_namespace(entry)
        name = self._read_name(entry)
        device = self._registered.devices.get(entry.iov)
        iov = self._find_iov(entry) if entry.length and device is None else None
        if iov is not None and not iov.writable:
            raise RefusedEntry(errno.EACCES)
        if namespace.uses is not None:
            self._asked.setdefault(namespace, []).append(name)
        if device is not None:
            call = Call(self._ring, entry, deadline, namespace=namespace, names=(name,), again=find_block)
            return self._read_to_device(call, device, calls)
        answer = self._get(entry, namespace, name, iov) if not namespace.measures.limiters else None
        if answer is None:
            call = Call(self._ring, entry, deadline, namespace=namespace, names=(name,), iov=iov)
            call.again = lambda call: self._get(call.entry, namespace, name, iov)
            self._reserve(call, min(entry.length, PIECE))
            calls.append(call)
        else:
            times = namespace.measures.seconds["get"]
            self._served[times] = self._served.get(times, 0) + 1
        return answer

    def _read_to_device(self, call: Call, device: DeviceIov, calls: list[Call]) -> Completion | None:
        """The answer to a GET or READ into a device, or None: it is in ``calls``. Refused, Short."""
        check_range(call.entry, device)
        call.device = device
        of = call.namespace if call.namespace is not None else call.file
        assert of is not None
        if not of.measures.limiters and (answer := call.again(call)) is not None:
            return answer
        self._reserve(call, 0)
        calls.append(call)
        return None

    def _get(self, entry: Entry, namespace: NamespaceHandle, name: bytes, iov: MappedIov | None) -> Completion | None:
        """The answer to a GET from what is known of its block; None: the event loop has to look. OSError."""
        if entry.flags & _VIEW and namespace.blocks is not None:
            return self._view_row(entry, namespace, name)
        binding = namespace.bindings.get(name)
        if binding is None or not binding.valid or not namespace.is_checked:
            return None
        content = binding.map
        version, size = content.version, content.size
        if size < 0:
            return None
        row = content.rows.get(0)
        pin = 0
        if entry.flags & _VIEW and size and row is not None and row.block is not None and namespace.may_list:
            place = None if self._is_lone else entry.user_data
            pin = self._registered.pins.take(row.block, partial(self._completions.note_pin, place))
        if pin:
            assert row is not None
            assert row.source is not None
            answer = Completion(size, row.start, row.source.arena, pin)
            row.block.note_use()
        elif size > entry.length:
            answer = Completion(-errno.EMSGSIZE, size)
        elif iov is None or self._read(content, 0, size, iov, entry.iov_offset) == size:
            answer = Completion(size)
        else:
            return None
        if content.version == version and binding.valid:
            if answer.result >= 0:
                namespace.measures.read_bytes += answer.result
                if content.notes_reads:
                    content.note_read()
            return answer
        if pin:
            self._registered.pins.give(pin)
        return None

    def _view_row(self, entry: Entry, namespace: NamespaceHandle, name: bytes) -> Completion | None:
        """The answer to a GET of a view of a block that is a row; None, as for `_get`: also where it cannot be held."""
        door = namespace.blocks
        if door is None or not (namespace.may_list and namespace.is_checked and door.sees_all and door.is_current):
            return None
        block = door.store.hold(namespace.ino, name)
        if block is None or namespace.is_absent or namespace.is_cut_off:
            return None
        place = None if self._is_lone else entry.user_data
        pin = self._registered.pins.take(block, partial(self._completions.note_pin, place))
        if not pin:
            return None
        namespace.measures.read_bytes += block.size
        return Completion(block.size, block.offset, block.arena, pin)

    def _copy_allowed(self, call: Call) -> None:
        """Copy the bytes of a put that the event loop allowed. OSError, also ENOMEM."""
        if not self._registered.share.take(call.entry.length):
            raise OSError(errno.ENOMEM, "calls in flight hold all memory")
        call.size += call.entry.length
        self._copy_put(call)

    def _make_keys_call(self, entry: Entry, deadline: float) -> Call:
        namespace = self._find_namespace(entry)
        if entry.flags & ~_OF_KEYS or entry.length > min(entry.key_length, KEYS_MAX):
            raise RefusedEntry(errno.EINVAL)
        _cut_aux(self._aux_area, entry.offset, entry.length)
        packed = _cut_aux(self._aux_area, entry.key_offset, entry.key_length)
        call = Call(self._ring, entry, deadline, namespace=namespace)
        with self._reserving(call, len(packed) + entry.length * KEY_SIZE):
            try:
                keys = unpack_keys(packed.tobytes(), entry.length)
            except ValueError:
                raise RefusedEntry(errno.EINVAL) from None
            names: list[bytes] = []
            for start in range(0, len(keys), NAMES_PER_TURN):
                names += file_names(keys[start : start + NAMES_PER_TURN])
                self._turns.pause(self._ring.seat)
        call.names = names
        return call

    def _cancel(self, entry: Entry, deadline: float) -> Completion | None:
        """Drop a waiting entry; the event loop cancels one that it has. Short."""
        if self.lines.remove(entry.offset):
            self._completions.post([entry.offset], [-errno.ECANCELED])
            return Completion(0)
        call = Call(self._ring, entry, deadline)
        self._reserve(call, 0)
        self._registered.cancel(call)
        return None
