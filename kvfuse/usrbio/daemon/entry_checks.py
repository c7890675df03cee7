"""Checks entries one by one in a ring's thread: answers what needs no wait, and makes calls of the others.

Entries are copies of what the client wrote, and the daemon trusts nothing in them: it finds the handles of a call, and
checks that its ranges lie in their iov or in the aux area.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kvfuse.access.namespace_handle import NamespaceHandle
from kvfuse.keys import KEY_SIZE_MAX, file_name, file_names
from kvfuse.usrbio.daemon import ring_reads
from kvfuse.usrbio.daemon.call import PIECE, Call, Completion, Entry, RefusedEntry, ServedRing, Short
from kvfuse.usrbio.daemon.client_memory import SMALL, Bytes, MappedIov
from kvfuse.usrbio.daemon.client_registry import ClientRegistry
from kvfuse.usrbio.daemon.columns import OFFSET_MAX
from kvfuse.usrbio.daemon.device_calls import check_range, find_block
from kvfuse.usrbio.daemon.device_iovs import DeviceIov
from kvfuse.usrbio.daemon.lines import Lines
from kvfuse.usrbio.daemon.once_buffers import SIZE as ONCE_SIZE
from kvfuse.usrbio.protocol.wire import HINT_BITS, KEYS_MAX, LENGTH_MAX, Flag, unpack_keys
from kvfuse.volume.measures.measures import Histogram
from kvfuse.volume.views.content_map import ContentMap

T = TypeVar("T")

CALL_SIZE = 8 << 10
"""Bytes that the task of a call takes, about."""
NAMES_PER_TURN = 1024
"""Keys that are unpacked before other rings may work."""
KEY_SIZE = 100
"""Bytes that a key takes beside its own, about."""
_VIEW = int(Flag.VIEW)  # plain numbers: arithmetic with flags is slow
_OF_KEYS = int(Flag.PREFIX | Flag.COSTS | Flag.NEAR)


def _cut_aux(aux: Bytes, offset: int, length: int) -> Bytes:
    if length > len(aux) or offset > len(aux) - length:
        raise RefusedEntry(errno.EINVAL)
    return aux[offset : offset + length]


class EntryChecks:
    """Of the entries of one ring, whose thread owns it. ``lines``: entries that wait. ``weigh``: see `operations`.

    A check returns a call for the event loop, the answer, or None: there is nothing more to do. RefusedEntry; OSError,
    whose number is the answer; Short.
    """

    def __init__(
        self, ring: ServedRing, registered: ClientRegistry, aux: Bytes, lines: Lines, weigh: Callable[[Call], int]
    ) -> None:
        self._ring = ring
        self._registered = registered
        self._aux_area = aux
        self._turns = ring.turns
        self._completions = ring.completions
        self._lines = lines
        self._weigh = weigh
        self.served: dict[Histogram, int] = {}
        """histogram -> reads and gets of the present batch"""
        self.is_lone = False
        """the present entry has no place"""

    def close(self) -> None:
        """Drop references to the ring's memory."""
        self._aux_area = self._aux_area[:0].copy()

    def release(self, entry: Entry, deadline: float) -> None:
        """RELEASE, which has no completion."""
        self._registered.pins.give(entry.offset)
        if not self.is_lone:
            self._completions.forget_entry(entry.user_data)

    # files

    def check_read(self, entry: Entry, deadline: float) -> Call | Completion:
        call = self._make_file_call(entry, deadline)
        file, device = call.file, self._registered.devices.get(entry.iov)
        assert file is not None
        if entry.flags or entry.offset > OFFSET_MAX:
            raise RefusedEntry(errno.EINVAL)
        if device is not None and file.readable:
            return self._read_to_device(call, device)
        iov = call.iov = self._find_iov(entry)
        if not file.readable:
            raise RefusedEntry(errno.EBADF)
        if not iov.writable:
            raise RefusedEntry(errno.EACCES)
        call.again = self._try_read
        if not file.measures.limiters and (answer := self._try_read(call)) is not None:
            times = file.measures.seconds["read"]
            self.served[times] = self.served.get(times, 0) + 1
            return answer
        self._reserve(call, ONCE_SIZE if file.goes_past_cache(entry.length) else min(entry.length, PIECE))
        return call

    def check_write(self, entry: Entry, deadline: float) -> Call:
        call = self._make_file_call(entry, deadline)
        if entry.flags or entry.offset > OFFSET_MAX:
            raise RefusedEntry(errno.EINVAL)
        iov = call.iov = self._find_iov(entry)
        if call.file is None or not call.file.writable:
            raise RefusedEntry(errno.EBADF)
        with self._reserving(call, entry.length):
            self._copy(call, np.empty(entry.length, np.uint8), iov, iov.read)
        return call

    def check_fsync(self, entry: Entry, deadline: float) -> Call:
        call = self._make_file_call(entry, deadline)
        self._reserve(call, min(entry.length, PIECE))
        return call

    def _make_file_call(self, entry: Entry, deadline: float) -> Call:
        file = self._registered.files.get(entry.handle)
        if file is None:
            raise RefusedEntry(errno.EBADF)
        return Call(self._ring, entry, deadline, file=file)

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
        weight = self._weigh(call)
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

    def check_put(self, entry: Entry, deadline: float) -> Call:
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

    def check_get(self, entry: Entry, deadline: float) -> Call | Completion:
        namespace = self._find_namespace(entry)
        name = self._read_name(entry)
        device = self._registered.devices.get(entry.iov)
        iov = self._find_iov(entry) if entry.length and device is None else None
        if iov is not None and not iov.writable:
            raise RefusedEntry(errno.EACCES)
        if device is not None:
            call = Call(self._ring, entry, deadline, namespace=namespace, names=(name,), again=find_block)
            return self._read_to_device(call, device)
        answer = self._get(entry, namespace, name, iov) if not namespace.measures.limiters else None
        if answer is None:
            call = Call(self._ring, entry, deadline, namespace=namespace, names=(name,), iov=iov)
            call.again = lambda call: self._get(call.entry, namespace, name, iov, has_asked=True)
            self._reserve(call, min(entry.length, PIECE))
            return call
        times = namespace.measures.seconds["get"]
        self.served[times] = self.served.get(times, 0) + 1
        return answer

    def _read_to_device(self, call: Call, device: DeviceIov) -> Call | Completion:
        """The answer to a GET or READ into a device, or the call. Refused, Short."""
        check_range(call.entry, device)
        call.device = device
        of = call.namespace if call.namespace is not None else call.file
        assert of is not None
        if not of.measures.limiters and (answer := call.again(call)) is not None:
            return answer
        self._reserve(call, 0)
        return call

    def _get(
        self, entry: Entry, namespace: NamespaceHandle, name: bytes, iov: MappedIov | None, *, has_asked: bool = False
    ) -> Completion | None:
        """The answer to a GET from what is known of its block; None: the event loop has to look. OSError."""
        if entry.flags & _VIEW and namespace.blocks is not None:
            return self._view_row(entry, namespace, name, has_asked=has_asked)
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
            place = None if self.is_lone else entry.user_data
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

    def _view_row(self, entry: Entry, namespace: NamespaceHandle, name: bytes, *, has_asked: bool) -> Completion | None:
        """The answer to a GET of a view of a block that is a row; None, as for `_get`: also where it cannot be held.

        ``has_asked``: the event loop has, if other hosts had to be asked.
        """
        door = namespace.blocks
        if door is None or not (namespace.may_list and namespace.is_checked and door.reads_all and door.is_current):
            return None
        if door.asks_first and not has_asked:
            return None
        block = door.store.hold(namespace.ino, name)
        if block is None or namespace.is_absent or namespace.is_cut_off:
            return None
        place = None if self.is_lone else entry.user_data
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

    def check_keys(self, entry: Entry, deadline: float) -> Call:
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

    def check_cancel(self, entry: Entry, deadline: float) -> Completion | None:
        """Drop a waiting entry; the event loop cancels one that it has. Short."""
        if self._lines.remove(entry.offset):
            self._completions.post([entry.offset], [-errno.ECANCELED])
            return Completion(0)
        call = Call(self._ring, entry, deadline)
        self._reserve(call, 0)
        self._registered.cancel(call)
        return None
