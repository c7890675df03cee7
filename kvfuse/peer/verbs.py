"""RDMA devices, through pyverbs, and memory registered with them. `queue_pair` reads with them.

pyverbs is Debian's ``python3-pyverbs`` (44) or a newer one (59), which has its constants elsewhere. None of its calls
lets go of the interpreter lock, so each call is to be short: memory is registered in pieces, with other work between.
pyverbs keeps no reference to registered memory: `Registration` does.
"""

from __future__ import annotations

import enum
import functools
import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from errno import EOPNOTSUPP, EPROTONOSUPPORT
from time import perf_counter
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple, Self

import numpy as np
import trio

from kvfuse.errors import EngineError
from kvfuse.peer.devices import DeviceInfo, choose_gid, find_devices

PIECE = 4 << 20
"""bytes that one call registers, where the memory is there already in well below a millisecond"""
PAGE = 4096
NO_DESCRIPTOR = 1 << 30
"""a number that no descriptor has"""
SOFTWARE_VENDORS = (0xFFFFFF, 0x626D74)
"""of devices that are programs (rxe, siw): they carry out a READ within the call that posts it"""


class NoDevice(EngineError):
    """RDMA cannot be used here: the message is one line that says what is missing."""


class VerbsError(EngineError):
    """A call of verbs failed."""


class CallTimes:
    """How long calls kept the event loop: seconds of the longest one of each kind."""

    def __init__(self) -> None:
        self.longest: dict[str, float] = {}

    @contextmanager
    def timed(self, kind: str) -> Iterator[None]:
        began = perf_counter()
        try:
            yield
        finally:
            self.longest[kind] = max(perf_counter() - began, self.longest.get(kind, 0.0))


def load_constants(load: Callable[[str], ModuleType] = importlib.import_module) -> dict[str, Any]:
    """``IBV_*`` by name: of version 44 from ``pyverbs.enums``, of 59 from enums in ``pyverbs.libibverbs_enums``.

    ImportError where neither is there.
    """
    try:
        module = load("pyverbs.enums")
    except ImportError:
        module = load("pyverbs.libibverbs_enums")
    constants = {name: value for name, value in vars(module).items() if name.startswith("IBV_")}
    for group in vars(module).values():
        if isinstance(group, type) and issubclass(group, enum.Enum):
            constants.update(group.__members__)
    return constants


@functools.cache
def pyverbs() -> Any:
    """Its modules and the constants of verbs, as attributes; imported when it is first needed. NoDevice."""
    names = ("addr", "cq", "device", "mr", "pd", "pyverbs_error", "qp", "wr")
    try:
        modules = {name: importlib.import_module(f"pyverbs.{name}") for name in names}
        return SimpleNamespace(**modules, **load_constants())
    except ImportError as error:
        raise NoDevice(f"RDMA needs pyverbs for this Python (Debian's package is python3-pyverbs): {error}") from error


def failure(what: str, error: Exception) -> VerbsError:
    """Of an error of pyverbs."""
    code = getattr(error, "error_code", 0)
    return VerbsError(f"{what}: {os.strerror(code) if code else error}")


@dataclass(eq=False)
class Registration:
    """Memory that devices may read (``is_remote``: for other hosts) or write, in pieces of one key each.

    All pieces but the last one have ``piece_size`` bytes, counted from ``address``: what does not cross a multiple of
    that has one key. `close` takes all access back, from READs under way too, and may take as long as registering did.
    """

    address: int
    size: int
    is_remote: bool
    owner: object
    """kept alive as long as the registration"""
    pieces: list[Any]
    piece_size: int = PIECE

    def __post_init__(self) -> None:
        self.lkeys = np.array([piece.lkey for piece in self.pieces], np.uint32)
        self.rkeys = np.array([piece.rkey for piece in self.pieces], np.uint32)

    @property
    def lkey(self) -> int:
        """Of memory that is one piece."""
        (key,) = self.lkeys.tolist()
        return int(key)

    @property
    def rkey(self) -> int:
        (key,) = self.rkeys.tolist()
        return int(key)

    @property
    def is_open(self) -> bool:
        return bool(self.pieces)

    def parts(self, address: int, size: int) -> list[MemoryPart]:
        """A range of it, cut where pieces end. ValueError for what is not in it."""
        start = address - self.address
        if not (self.pieces and start >= 0 and size > 0 and start + size <= self.size):
            raise ValueError("this memory is not registered")
        parts = []
        while size:
            number, within = divmod(start, self.piece_size)
            length = min(size, self.piece_size - within)
            lkey, rkey = int(self.lkeys[number]), int(self.rkeys[number])
            parts.append(MemoryPart(self.address + start, length, lkey, rkey))
            start, size = start + length, size - length
        return parts

    def close_piece(self) -> None:
        """Take back the access to the last of the pieces that are left."""
        try:
            self.pieces[-1].close()
        except pyverbs().pyverbs_error.PyverbsError as error:
            raise failure("a registration cannot be ended", error) from error
        self.pieces.pop()

    def close(self) -> None:
        while self.pieces:
            self.close_piece()
        self.owner = None

    async def aclose(self) -> None:
        """`close`, with turns for other tasks between the pieces; to its end, also when cancelled."""
        with trio.CancelScope(shield=True):
            while self.pieces:
                self.close_piece()
                await trio.lowlevel.checkpoint()
        self.owner = None


class MemoryPart(NamedTuple):
    """Of registered memory, within one piece."""

    address: int
    size: int
    lkey: int
    rkey: int


class RdmaDevice:
    """An open port of a device. Its queue pairs and registrations are to be closed before it is."""

    def __init__(self, info: DeviceInfo) -> None:
        """NoDevice."""
        verbs = pyverbs()
        if not info.is_active:
            raise NoDevice(f"RDMA device {info}: its port is {info.state}")
        gid = choose_gid(info)
        if gid is None:
            raise NoDevice(f"RDMA device {info} has no address: its network interface may be down")
        self.info, self.gid = info, gid
        self.calls = CallTimes()
        """of all that is done with it"""
        try:
            self.context = verbs.device.Context(name=info.name)
            port = self.context.query_port(info.port)
            limits = self.context.query_device()
            self.domain = verbs.pd.PD(self.context)
        except verbs.pyverbs_error.PyverbsError as error:
            raise NoDevice(f"RDMA device {info} cannot be opened: {error}") from error
        self.lid, self.mtu = int(port.lid), int(port.active_mtu)
        """``mtu``: as a constant, 1 (256 bytes) to 5 (4096 bytes)"""
        self.depth_max, self.reads_max = int(limits.max_qp_wr), int(limits.max_qp_rd_atom)
        self.is_software = limits.vendor_id in SOFTWARE_VENDORS

    async def register(self, address: int, size: int, owner: object, *, remote: bool) -> Registration:
        """Memory of this process that READs may write; with ``remote``, that other hosts may read.

        Other tasks have turns between the pieces. It pins the memory: what is not there yet is made by this, slowly, so
        touch it before. VerbsError, with nothing registered: it cannot be written here, or more than RLIMIT_MEMLOCK.
        """
        registration = Registration(address, size, remote, owner, [])
        try:
            for start in range(0, size, PIECE):
                piece = self._register_piece(address + start, min(PIECE, size - start), remote)
                registration.pieces.append(piece)
                await trio.lowlevel.checkpoint()
        except BaseException:
            await registration.aclose()
            raise
        registration.__post_init__()
        return registration

    def _register_piece(self, address: int, size: int, remote: bool) -> Any:
        verbs = pyverbs()
        access = verbs.IBV_ACCESS_LOCAL_WRITE | (verbs.IBV_ACCESS_REMOTE_READ if remote else 0)
        try:
            with self.calls.timed("register"):
                return verbs.mr.MR(self.domain, size, access, address=address)
        except verbs.pyverbs_error.PyverbsError as error:
            raise failure(f"{size} bytes of memory cannot be registered with {self.info}", error) from error

    def register_dmabuf(self, descriptor: int, offset: int, size: int, *, remote: bool) -> Registration:
        """Memory of another device, of which there is a dma-buf. Its addresses are offsets in that. VerbsError."""
        verbs = pyverbs()
        access = verbs.IBV_ACCESS_LOCAL_WRITE | (verbs.IBV_ACCESS_REMOTE_READ if remote else 0)
        try:
            with self.calls.timed("register"):
                piece = verbs.mr.DmaBufMR(self.domain, size, access, dmabuf=descriptor, offset=offset)
        except verbs.pyverbs_error.PyverbsError as error:
            raise failure(f"{self.info} cannot use memory of other devices", error) from error
        return Registration(offset, size, remote, None, [piece], size)

    def lacks_dmabuf(self) -> str:
        """Why `register_dmabuf` cannot work, "" where it may: what is answered for a descriptor that is none."""
        verbs = pyverbs()
        try:
            verbs.mr.DmaBufMR(self.domain, PAGE, verbs.IBV_ACCESS_LOCAL_WRITE, dmabuf=NO_DESCRIPTOR, offset=0).close()
        except verbs.pyverbs_error.PyverbsError as error:
            if getattr(error, "error_code", 0) in (EOPNOTSUPP, EPROTONOSUPPORT):
                return f"the driver of {self.info} registers no dma-buf (Linux 5.12 with mlx5, irdma, ... does)"
        return ""

    def close(self) -> None:
        self.domain.close()
        self.context.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def active_devices() -> list[DeviceInfo]:
    """Ports of devices that can be used, of which none is opened; one at least. NoDevice."""
    found = find_devices()
    active = [info for info in found if info.is_active]
    if not active:
        states = ", ".join(f"{info} is {info.state}" for info in found)
        raise NoDevice(f"no port of an RDMA device is active: {states}" if found else "this host has no RDMA device")
    return active


def open_device(name: str | None = None) -> RdmaDevice:
    """The one of this name ("mlx5_0", or "mlx5_0:2" for its second port), or the first that is active. NoDevice."""
    pyverbs()
    if name is None:
        return RdmaDevice(active_devices()[0])
    found = find_devices()
    chosen = next((info for info in found if name in (str(info), info.name)), None)
    if chosen is None:
        raise NoDevice(f"no RDMA device {name}; there are: {', '.join(map(str, found)) or 'none'}")
    return RdmaDevice(chosen)
