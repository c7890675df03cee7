"""The client: one connection to a mount's daemon, and what is registered through it."""

from __future__ import annotations

import json
import os
import threading
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import numpy as np

from kvfuse.errors import Disconnected
from kvfuse.usrbio.client.files import File, Namespace, Registered
from kvfuse.usrbio.client.gpu.device import Device
from kvfuse.usrbio.client.gpu.gpu_memory import GpuIov
from kvfuse.usrbio.client.gpu.gpus import Gpus, Stream
from kvfuse.usrbio.client.gpu.host_staging import STAGING_SIZE
from kvfuse.usrbio.client.iov import (
    Addresses,
    Iov,
    SharedPart,
    Sizes,
    address_of,
    bytes_of,
    map_descriptor,
    new_memory,
    shared_part,
)
from kvfuse.usrbio.client.ring import Ring
from kvfuse.usrbio.client.session import Bytes, Session, find_mount
from kvfuse.usrbio.client.tokens import Token, find_tokens
from kvfuse.usrbio.protocol.wire import Op

DEADLINE_S = 10.0


def connect(path: str | os.PathLike[str], *, deadline: float = DEADLINE_S, token: Token = None) -> Client:
    """A client of the mount that ``path`` lies in; each control request may take ``deadline`` seconds.

    ``token``: of the namespaces that it is to use; the path of a file that has it; None: what the environment variables
    KVFUSE_TOKEN and KVFUSE_TOKEN_FILE say. FileNotFoundError where there is no such mount, Disconnected where nobody
    answers, ValueError for what is no token.
    """
    return Client(find_mount(path), deadline, find_tokens(token))


class Client(AbstractContextManager["Client"]):
    """A connection and all that is registered through it. Safe to use from any thread."""

    def __init__(self, mount: Path, deadline: float, tokens: Sequence[str] = ()) -> None:
        self.mount = str(mount)
        self._tokens = list(tokens)
        self.session = Session(mount, deadline, tokens)
        self._deadline = deadline
        self._lock = threading.Lock()
        self._iovs: set[Iov] = set()
        self._named: set[Registered] = set()
        self._places: tuple[tuple[int, Iov], ...] = ()
        """(address, iov) of those that are used in place, ordered; replaced, never changed"""
        self.gpus = Gpus()
        """memory of GPUs"""

    # -- memory --------------------------------------------------------------------------------------

    def iov(self, size: int) -> Iov:
        """New shared memory of ``size`` bytes, zeroed: the fastest kind."""
        return self._add_iov(*new_memory(size))

    def wrap(self, buffer: object) -> Iov:
        """Memory that is there already: a SharedMemory, the descriptor of shared memory, an array, a CPU tensor, any
        writable buffer. Shared memory is used in place if this process has a descriptor of it; other
        memory is copied from and to (``Iov.in_place`` says which)."""
        iov = self.share(buffer)
        if iov is None:
            array = bytes_of(buffer)
            mirror, part = new_memory(len(array), read_only=not array.flags.writeable)
            iov = self._add_iov(array, part, mirror)
        return iov

    def share(self, buffer: object) -> Iov | None:
        """As `wrap`, for what can be used in place; None for other memory."""
        if isinstance(buffer, int):
            return self._add_iov(*map_descriptor(buffer))
        array = bytes_of(buffer)
        part = shared_part(array)
        if part is not None:
            with suppress(OSError):  # mapped from a file of a disk: the daemon takes only memory
                return self._add_iov(array, part)
        return None

    def iov_from_gpu(
        self, memory: object, *, device: Device | None = None, stream: Stream = "producer",
        staging_size: int = STAGING_SIZE,
    ) -> GpuIov:  # fmt: skip
        """Memory of a GPU: a torch tensor, or what has `__cuda_array_interface__` or `__dlpack__`; docs/gpu.md.

        ``stream``: the CUDA stream that writes and reads the memory: each copy waits for what it was given before. A
        handle, a stream of torch, CuPy or cuda-core, or None: there is none. "producer": torch's current one, or what
        the interface says, else the default stream. ``device``: that it is memory of, if it is no GPU.
        ``staging_size``: bytes of host memory between GPU and daemon, shared by all that name the same size.
        TypeError, ValueError for memory that cannot be used; DeviceError where there is no GPU, or it fails.
        """
        return self.gpus.add(self, memory, device, stream, staging_size)

    def locate(self, array: Bytes) -> tuple[Iov, int] | None:
        """(iov, offset) of bytes that lie in an iov used in place, else None."""
        places, address = self._places, address_of(array)
        index = bisect_right(places, address, key=lambda place: place[0]) - 1
        if index < 0:
            return None
        start, iov = places[index]
        return (iov, address - start) if address + len(array) <= start + iov.size else None

    def locate_all(self, addresses: Addresses, sizes: Sizes) -> tuple[Iov, Sizes] | None:
        """(iov, offset of each) of bytes that all lie in one iov used in place, else None. There is one at least."""
        places, first = self._places, int(addresses.min())
        index = bisect_right(places, first, key=lambda place: place[0]) - 1
        if index < 0:
            return None
        start, iov = places[index]
        offsets = (addresses - np.uint64(start)).view(np.int64)
        return (iov, offsets) if int((offsets + sizes).max()) <= iov.size else None

    def _add_iov(self, array: Bytes, part: SharedPart, mirror: Bytes | None = None) -> Iov:
        iov = Iov(array, part, mirror, self._forget_iov)
        iov.populate()
        try:
            with self._lock:
                iov.register(self.session)
                self._iovs.add(iov)
                self._sort_places()
        except BaseException:
            iov.close()
            raise
        return iov

    def _forget_iov(self, iov: Iov) -> None:
        with self._lock:
            self._iovs.discard(iov)
            self._sort_places()

    def _sort_places(self) -> None:
        located = sorted((iov for iov in self._iovs if iov.in_place), key=lambda iov: (iov.address, iov.size))
        self._places = tuple((iov.address, iov) for iov in located)

    # -- what entries name, and rings ----------------------------------------------------------------

    def file(self, target: int | str | os.PathLike[str], mode: str = "r", *, once: bool = False) -> File:
        """Register a file of the mount: a descriptor open for ``mode`` ("r", "w" or "rw"), or a path.

        A path is created where ``mode`` writes, never truncated. Both stay the caller's; the daemon has its own.
        PermissionError where the descriptor is not open for the mode.
        ``once``: its bytes need not stay in the page cache of the disk, as with O_DIRECT. The daemon reads past that,
        with less of the processor; it uses what is there already.
        """
        file = File(target, mode, self._forget_named, once=once)
        self._add_named(file, target if isinstance(target, int) else None)
        return file

    def namespace(
        self, path: str | os.PathLike[str], create: bool = True, *, mode: int = 0o644,
        descriptor: Mapping[str, str | int] | None = None,
    ) -> Namespace:  # fmt: skip
        """A folder of the mount (``path`` is relative to its root) whose files are blocks.

        ``create``: where it is absent it is made, and is a cache then, whose blocks may be evicted; in a cache it is a
        part of that.
        ``mode``: permission bits of new blocks. FileNotFoundError without ``create``.
        ``descriptor``: what the blocks are: model, revision, dtype, layout, ... (up to 1000 bytes as JSON). The first
        one is pinned to the namespace, another one refused: FileExistsError, which shows both. The same with a larger
        ``version`` clears the cache. A folder that is made then is a namespace of its own.
        """
        text = json.dumps(dict(descriptor)) if descriptor else ""
        namespace = Namespace(Path(self.mount, path), create, mode, self._forget_named, text)
        self._add_named(namespace, None)
        return namespace

    def show_token(self, token: str) -> None:
        """Have the token of a namespace, for what is registered from here on. ValueError: it is none."""
        with self._lock:
            if token not in self._tokens:
                self.session.show_token(token)
                self._tokens.append(token)

    def ring(self, entries: int = 256, *, aux_size: int | None = None, ops: Iterable[Op] | None = None) -> Ring:
        """A ring of ``entries`` (a power of two), for one thread at a time.

        ``ops``: what it may do (None: everything). ``aux_size``: bytes for the keys and results of entries under
        way; None: enough for a key an entry and for thousands more in EXISTS, DELETE and PREFETCH.
        """
        return Ring(self, entries, aux_size, ops)

    def _add_named(self, named: Registered, descriptor: int | None) -> None:
        with self._lock:
            named.register(self.session, descriptor)
            self._named.add(named)

    def _forget_named(self, named: Registered) -> None:
        with self._lock:
            self._named.discard(named)

    # -- the end, and a new start --------------------------------------------------------------------

    def reconnect(self) -> None:
        """Connect again, and register everything again: the same objects go on working. Where the connection stands, as
        another thread was faster, nothing is done.

        What rings had under way is forgotten; each ring starts anew at its next use. A file whose path is gone, or
        is another file's now, answers EBADF from here on; a namespace is made again. Disconnected while there is no
        daemon.
        """
        with self._lock:
            if not self.session.has_ended:
                return
            try:
                session = Session(find_mount(self.mount), self._deadline, self._tokens)
            except FileNotFoundError as error:
                raise Disconnected(str(error)) from None
            self.session.close()
            try:
                for iov in self._iovs:
                    iov.register(session)
                for named in self._named:
                    named.register_again(session)
                self.gpus.register(session)
            except BaseException:
                session.close()
                raise
            self.session = session

    def close(self) -> None:
        """The daemon takes back all that was registered. Views stay true while they are held."""
        self.gpus.close()
        with self._lock:
            self.session.close()
            iovs = tuple(self._iovs)
        for iov in iovs:
            iov.close()

    def __exit__(self, *_: object) -> None:
        self.close()
