"""Translates FUSE requests to calls of a volume. It has no state but the open handles, and takes no decisions.

pyfuse3 calls one coroutine for each request. It must raise nothing but FUSEError: any other exception ends the main
loop and with it the mount. So ``answer_request`` wraps every handler: it turns the project's errors into errno values
by the one table, and unexpected ones into EIO, a traceback in the log and a count.

Reply objects (``_entry``, ``_absent``, ``_file_info``) exist once and are refilled: pyfuse3 copies them into
the reply as soon as the handler returns, before any other task can run.
"""

from __future__ import annotations

import errno
import functools
import itertools
import json
import logging
import os
import random
import reprlib
import stat
import sys
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import pyfuse3
from pyfuse3 import EntryAttributes, FileInfo, FUSEError, ReaddirToken, RequestContext, SetattrFields, StatvfsData

from kvfuse import errors
from kvfuse.credentials import Capability, Credentials
from kvfuse.errnos import errno_of
from kvfuse.fs.door_handover import KeptHandover
from kvfuse.fs.handles import HandleTable, OpenFiles
from kvfuse.fs.idempotent_changes import IdempotentChanges
from kvfuse.fs.kernel import LISTING_SECONDS, CachedNames
from kvfuse.fs.virtual import FOLDER_INODE, FOLDER_NAME, Viewer, VirtualFolder, is_virtual, is_virtual_handle
from kvfuse.native import fusewire
from kvfuse.serving import NUMBERS, SERVED
from kvfuse.volume.api import NAME_MAX, ROOT_INODE, Attributes, Caller, Changes, Handle, VolumeApi
from kvfuse.volume.measures.profiling import PROFILE

log = logging.getLogger(__name__)

BLOCK_SIZE = 4096
"""bytes; of statfs and of st_blksize"""
READER_BIT, READERS = 44, 1 << 18
"""A directory's handle is its inode number and, from this bit on, a number of who reads it; larger inodes have none."""
LISTING_BATCH = 128
"""entries that one call of the volume lists, at most"""
LISTING_BATCH_MIN = 16
LISTING_BYTES = 32 << 10
"""the buffer of a getdents call"""
LISTED_BYTES = 24 + 128
"""of one entry, with its attributes, besides its name"""
INFO_XATTR = b"kvfuse.info"
"""its value is ``volume.info`` of the inode as JSON; listxattr omits it"""
ROOT_XATTRS = b"trusted."
"""Only CAP_SYS_ADMIN sees these: the kernel refuses the others, but leaves lists to us"""


def _directory_of(handle: int) -> int:
    return handle & (1 << READER_BIT) - 1 if handle < READERS << READER_BIT else handle


def _refuse_virtual(ino: int) -> None:
    """NotPermitted for a change of a virtual inode."""
    if is_virtual(ino):
        raise errors.NotPermitted(f"inode {ino} is a virtual file")


def _return_no_request() -> tuple[int, bool]:
    return fusewire.NO_REQUEST


P = ParamSpec("P")
R = TypeVar("R")
Handler = Callable[Concatenate["KvfuseOperations", P], Coroutine[Any, Any, R]]


def answer_request(handler: Handler[P, R]) -> Handler[P, R]:
    """Wrap a handler so that it raises nothing but FUSEError (and a cancellation)."""

    kind = handler.__name__

    @functools.wraps(handler)
    async def answer(self: KvfuseOperations, /, *args: P.args, **kwargs: P.kwargs) -> R:
        self.requests[kind] += 1
        self.under_way_count += 1
        SERVED.set((kind, next(NUMBERS)))
        profiled, has_failed = fusewire.begin_profiled() if PROFILE.is_on else None, False
        try:
            return await handler(self, *args, **kwargs)
        except Exception as error:
            has_failed = True
            number = errno_of(error)
            if number is None:
                self.unexpected_error_count += 1
                log.exception("%s%s failed", kind, reprlib.repr(args))  # reprlib cuts a megabyte of written data
                number = errno.EIO
            raise FUSEError(number) from None
        finally:
            self.under_way_count -= 1
            if profiled is not None:
                fusewire.end_profiled(profiled, has_failed)
            if (seal := self._volume.seal) is not None:
                seal()

    return answer


class KvfuseOperations(pyfuse3.Operations):
    """Answers the kernel's requests from ``volume``, those for MNT/.kvfuse from ``virtual``.

    Timeouts in seconds.
    ``names``, ``absences``: directories whose names, or absent names, the kernel may cache.
    A file's handle is the volume's; a directory's has its inode number, so the next daemon knows it.
    ``handover``: state of the former daemon, and for the next one. None: nothing outlives this daemon.
    ``answered_in_c``: counts of requests that did not come here; see `Volume.kernel_answers`.
    """

    def __init__(
        self,
        volume: VolumeApi,
        virtual: VirtualFolder,
        *,
        entry_timeout: float,
        attr_timeout: float,
        negative_timeout: float,
        handover: KeptHandover | None = None,
        answered_in_c: Callable[[], dict[str, int]] = dict,
    ) -> None:
        super().__init__()
        self._answered_in_c = answered_in_c
        self._volume = volume
        self._virtual = virtual
        if handover is not None:
            self._open = OpenFiles(volume, handover.handles, handover.lost)
        else:
            self._open = OpenFiles(volume, None)
        self.number_of_request = fusewire.request if handover is not None else _return_no_request
        """see `fusewire.request`"""
        decisions = handover.decisions if handover is not None else None
        self._once = IdempotentChanges(volume, decisions, lambda: self.number_of_request())
        self._entry = EntryAttributes()
        self.names = CachedNames(entry_timeout, LISTING_SECONDS)
        self.attr_timeout = attr_timeout
        self._entry.st_blksize = BLOCK_SIZE
        self._absent = EntryAttributes()  # inode 0: the kernel caches that the name does not exist
        self._absent.entry_timeout = negative_timeout
        self.absences = CachedNames(negative_timeout)
        if handover is not None and not handover.is_first:
            self.names.note_all()
            self.absences.note_all()
        self._file_info = FileInfo()
        self._readers = itertools.count(random.randrange(READERS))  # a former daemon's are others, most likely
        self.unexpected_error_count = 0
        self.under_way_count = 0
        """requests in flight: read and not answered"""
        self.requests: Counter[str] = Counter()
        """kind -> requests that the kernel sent; a batch of forgets is one"""

    def admit_binder(self, name: bytes) -> None:
        """Let whoever knows this one-time name make the control socket by it. From any thread."""
        self._virtual.binding = name

    def add_handle(self, fh: int, handle: Handle, unique: int = 0) -> bool:
        """As `OpenFiles.add_given`."""
        return self._open.add_given(fh, handle, unique)

    def add_socket(self) -> None:
        """Add the name of the control socket, which a former daemon bound."""
        self._virtual.add_socket()

    def stats(self) -> dict[str, int | dict[str, int]]:
        """Counters and gauges of the door."""
        answered = self._answered_in_c()
        open_count = answered.pop("open_handles", 0) + answered.pop("drafts", 0)
        others = {"absent", "read_bytes", "written_bytes"}
        return {
            "open_handle_count": len(self._open) + open_count,
            "unexpected_error_count": self.unexpected_error_count,
            "requests": dict(self.requests + Counter({kind: answered[kind] for kind in answered.keys() - others})),
            "answered_in_c": answered,
            "wire": fusewire.counts(),
        }

    def _fill_entry(self, attributes: Attributes, directory: int) -> EntryAttributes:
        """Fill the reply about a name of ``directory``."""
        timeout = self._let_keep(directory, means_directory=stat.S_ISDIR(attributes.mode))
        return self._fill_attributes(attributes, timeout)

    def _fill_attributes(self, attributes: Attributes, name_timeout: float = 0.0) -> EntryAttributes:
        """Fill the reply about an inode. ``name_timeout``: seconds for which the kernel may cache the reply's name."""
        entry = self._entry
        entry.entry_timeout = name_timeout
        entry.attr_timeout = self.attr_timeout if self._volume.inodes.may_keep_attributes(attributes.ino) else 0.0
        entry.st_ino = attributes.ino
        entry.st_mode = attributes.mode
        entry.st_nlink = attributes.nlink
        entry.st_uid = attributes.uid
        entry.st_gid = attributes.gid
        entry.st_rdev = attributes.rdev
        entry.st_size = attributes.size
        entry.st_blocks = attributes.blocks
        entry.st_atime_ns = attributes.atime
        entry.st_mtime_ns = attributes.mtime
        entry.st_ctime_ns = attributes.ctime
        return entry

    def _may_keep_name(self, directory: int, *, means_directory: bool) -> bool:
        """The kernel may cache a name in a directory. False for ``means_directory``: it may cache none there."""
        return is_virtual(directory) or self._volume.tree.may_keep(directory, means_directory=means_directory)

    def _let_keep(self, directory: int, *, means_directory: bool) -> float:
        """Seconds for which the kernel may cache a name in a directory. Later changes there invalidate it."""
        may_keep = self._may_keep_name(directory, means_directory=means_directory)
        return self.names.note_directory(directory) if may_keep else 0.0

    def _fill_file_info(self, fh: int, handle: Handle) -> FileInfo:
        """Fill the reply. O_DIRECT needs no ``direct_io``: the kernel bypasses its cache for that descriptor alone,
        keeps it coherent with the others, and still allows mmap. With `fusewire`, direct writes run in parallel."""
        info = self._file_info
        info.fh = fh | fusewire.marks(
            direct=handle.direct, close_is_awaited=self._volume.files.is_close_awaited(handle)
        )
        info.keep_cache = handle.cache_valid
        info.direct_io = False
        return info

    # -- without a task ------------------------------------------------------------------------------

    def answer_at_once(self) -> None:
        """Answer what is asked most without a task for each request, where that need not wait: see `fusewire`."""
        fusewire.answer_at_once(self._look_up, self._get_attributes, self._forget, self._release)

    def _look_up(self, parent: int, name: bytes) -> tuple[Attributes | None, float, float] | None:
        if is_virtual(parent) or (parent == ROOT_INODE and name == FOLDER_NAME):
            return None
        found = self._volume.tree.look_up_at_once(parent, name)
        if found is None:
            return None
        self.requests["lookup"] += 1
        if found is False:
            return None, self.absences.note_directory(parent), 0.0
        return found, self.names.note_directory(parent), self.attr_timeout

    def _get_attributes(self, ino: int) -> tuple[Attributes | None, float, float] | None:
        found = None if is_virtual(ino) else self._volume.inodes.attributes_at_once(ino)
        if found is None:
            return None
        self.requests["getattr"] += 1
        return found, 0.0, self.attr_timeout

    def _forget(self, ino: int, count: int) -> None:
        self.requests["forget"] += 1
        if not is_virtual(ino):
            self._volume.tree.forget(ino, count)

    def _release(self, fh: int) -> bool:
        is_released = not is_virtual_handle(fh) and self._open.release_at_once(fh)
        self.requests["release"] += is_released
        return is_released

    # -- names ---------------------------------------------------------------------------------------

    @answer_request
    async def lookup(self, parent_inode: int, name: bytes, ctx: RequestContext) -> EntryAttributes:
        try:
            if is_virtual(parent_inode):
                return self._fill_entry(await self._lookup_virtual(parent_inode, name), parent_inode)
            if parent_inode == ROOT_INODE and name == FOLDER_NAME:
                return self._fill_entry(self._virtual.get_attributes(FOLDER_INODE), parent_inode)
            return self._fill_entry(await self._volume.tree.lookup(parent_inode, name), parent_inode)
        except errors.NotFound:
            if not self._may_keep_name(parent_inode, means_directory=False):
                raise
            self.absences.note_directory(parent_inode)
            return self._absent

    async def _lookup_virtual(self, ino: int, name: bytes) -> Attributes:
        if name == b"..":
            return await self._volume.tree.lookup(ROOT_INODE, b".")
        if ino != FOLDER_INODE:
            raise errors.NotADirectory(f"inode {ino} is a virtual file")
        return self._virtual.lookup(name)

    @answer_request
    async def forget(self, inode_list: Sequence[tuple[int, int]]) -> None:
        for ino, count in inode_list:
            if not is_virtual(ino):
                self._volume.tree.forget(ino, count)

    @answer_request
    async def create(
        self, parent_inode: int, name: bytes, mode: int, flags: int, ctx: RequestContext
    ) -> tuple[FileInfo, EntryAttributes]:
        self._virtual.guard_name(parent_inode, name)
        unique, is_resent = self.number_of_request()
        caller = Caller(ctx.uid, ctx.gid, ctx.pid)
        try:
            handle, attributes = await self._once.create(parent_inode, name, mode, caller, flags)
        except errors.Exists:
            if flags & os.O_EXCL:
                raise
            # Another door made the name after the kernel saw that it was absent. Stale makes the kernel look
            # the name up again and open that file, permissions checked.
            raise errors.Stale(f"{os.fsdecode(name)} was created meanwhile") from None
        finally:
            if is_resent:
                await self._open.drop_resent(unique)
        fh = self._open.add(handle, attributes.ino, flags, caller, unique)
        return self._fill_file_info(fh, handle), self._fill_entry(attributes, parent_inode)

    @answer_request
    async def mknod(self, parent_inode: int, name: bytes, mode: int, rdev: int, ctx: RequestContext) -> EntryAttributes:
        if parent_inode == FOLDER_INODE:
            return self._fill_entry(self._virtual.make_socket(name, mode), parent_inode)
        self._virtual.guard_name(parent_inode, name)
        caller = Caller(ctx.uid, ctx.gid, ctx.pid)
        return self._fill_entry(await self._once.make_node(parent_inode, name, mode, rdev, caller), parent_inode)

    @answer_request
    async def mkdir(self, parent_inode: int, name: bytes, mode: int, ctx: RequestContext) -> EntryAttributes:
        self._virtual.guard_name(parent_inode, name)
        caller = Caller(ctx.uid, ctx.gid, ctx.pid)
        return self._fill_entry(await self._once.make_directory(parent_inode, name, mode, caller), parent_inode)

    @answer_request
    async def symlink(self, parent_inode: int, name: bytes, target: bytes, ctx: RequestContext) -> EntryAttributes:
        self._virtual.guard_name(parent_inode, name)
        caller = Caller(ctx.uid, ctx.gid, ctx.pid)
        return self._fill_entry(await self._once.make_symlink(parent_inode, name, target, caller), parent_inode)

    @answer_request
    async def readlink(self, inode: int, ctx: RequestContext) -> bytes:
        return await self._volume.inodes.read_symlink(inode)

    @answer_request
    async def link(self, inode: int, new_parent_inode: int, new_name: bytes, ctx: RequestContext) -> EntryAttributes:
        self._virtual.guard_name(new_parent_inode, new_name)
        _refuse_virtual(inode)
        return self._fill_entry(await self._once.link(inode, new_parent_inode, new_name), new_parent_inode)

    @answer_request
    async def unlink(self, parent_inode: int, name: bytes, ctx: RequestContext) -> None:
        self._virtual.guard_name(parent_inode, name)
        await self._once.unlink(parent_inode, name)

    @answer_request
    async def rmdir(self, parent_inode: int, name: bytes, ctx: RequestContext) -> None:
        self._virtual.guard_name(parent_inode, name)
        await self._once.remove_directory(parent_inode, name)

    @answer_request
    async def rename(
        self,
        parent_inode_old: int,
        name_old: bytes,
        parent_inode_new: int,
        name_new: bytes,
        flags: int,
        ctx: RequestContext,
    ) -> None:
        self._virtual.guard_name(parent_inode_old, name_old)
        self._virtual.guard_name(parent_inode_new, name_new)
        await self._once.rename(parent_inode_old, name_old, parent_inode_new, name_new, flags)

    # -- attributes ----------------------------------------------------------------------------------

    @answer_request
    async def getattr(self, inode: int, ctx: RequestContext) -> EntryAttributes:
        if is_virtual(inode):
            return self._fill_attributes(self._virtual.get_attributes(inode))
        return self._fill_attributes(await self._volume.inodes.attributes(inode))

    async def _stat(self, ino: int) -> Attributes:
        return self._virtual.get_attributes(ino) if is_virtual(ino) else await self._volume.inodes.attributes(ino)

    def take_over(self, *, is_all: bool = False) -> None:
        """Go on with files that C answered about alone so far."""
        for fh, handle in self._volume.files.take_over(is_all=is_all):
            self._open.take(fh, handle)

    @answer_request
    async def setattr(
        self, inode: int, attr: EntryAttributes, fields: SetattrFields, fh: int | None, ctx: RequestContext
    ) -> EntryAttributes:
        _refuse_virtual(inode)
        changes = Changes(
            mode=stat.S_IMODE(attr.st_mode) if fields.update_mode else None,
            uid=attr.st_uid if fields.update_uid else None,
            gid=attr.st_gid if fields.update_gid else None,
            size=attr.st_size if fields.update_size else None,
            atime=attr.st_atime_ns if fields.update_atime else None,
            mtime=attr.st_mtime_ns if fields.update_mtime else None,
            ctime=attr.st_ctime_ns if fields.update_ctime else None,
        )
        caller = Caller(ctx.uid, ctx.gid, ctx.pid)
        return self._fill_attributes(await self._volume.inodes.set_attributes(inode, changes, caller))

    @answer_request
    async def access(self, inode: int, mode: int, ctx: RequestContext) -> bool:
        """Check permissions. The kernel asks only on a mount without ``default_permissions``."""
        attributes = await self._stat(inode)
        if ctx.uid == 0:
            return not mode & os.X_OK or stat.S_ISDIR(attributes.mode) or bool(attributes.mode & 0o111)
        if ctx.uid == attributes.uid:
            granted = attributes.mode >> 6
        elif attributes.gid == ctx.gid or attributes.gid in pyfuse3.get_sup_groups(ctx.pid):
            granted = attributes.mode >> 3
        else:
            granted = attributes.mode
        return mode & 0o7 & ~granted == 0

    # -- files ---------------------------------------------------------------------------------------

    @answer_request
    async def open(self, inode: int, flags: int, ctx: RequestContext) -> FileInfo:
        if is_virtual(inode):
            handle = self._virtual.open(inode, flags, Viewer.from_process(ctx.uid, ctx.pid))
            marks = fusewire.marks(direct=False, close_is_awaited=False)
            return FileInfo(fh=handle | marks, direct_io=True, keep_cache=False)
        unique, is_resent = self.number_of_request()
        caller = Caller(ctx.uid, ctx.gid, ctx.pid)
        try:
            handle = await self._volume.files.open(inode, flags, caller)
        finally:
            if is_resent:
                await self._open.drop_resent(unique)
        return self._fill_file_info(self._open.add(handle, inode, flags, caller, unique), handle)

    @answer_request
    async def read(self, fh: int, off: int, size: int) -> bytes:
        handle = self._open.get(fh)
        if handle is None:
            if is_virtual_handle(fh):
                return self._virtual.read(fh, off, size)
            handle = await self._open.find(fh)
        return cast(bytes, await self._volume.files.read(handle, off, size))  # pyfuse3 takes any buffer

    @answer_request
    async def write(self, fh: int, off: int, buf: bytes) -> int:
        is_resent = self.number_of_request()[1]
        # Bytes of a mapping are not lost, and their offset is right; fsync reports losses to its writer.
        is_mapped = self._open.has_losses and fusewire.writes_back()
        handle = self._open.get(fh) or await self._open.find(fh)
        if not is_mapped:
            self._open.report_loss(fh, HandleTable.fail_write)
        if handle.appends and not is_mapped:
            off = self._open.limit_append(fh, handle, off)
            if is_resent and await self._once.is_written(handle, off, buf):
                return len(buf)
        return await self._volume.files.write(handle, off, buf, by_kernel=True)

    @answer_request
    async def flush(self, fh: int) -> None:
        if not is_virtual_handle(fh):
            await self._volume.files.flush(self._open.get(fh) or await self._open.find(fh))
            if self._open.has_losses:
                await self._open.wait_for_dropped_losses()
            self._open.report_loss(fh, HandleTable.fail_close)

    @answer_request
    async def fsync(self, fh: int, datasync: bool) -> None:
        if not is_virtual_handle(fh):
            number = self.number_of_request()
            await self._volume.files.fsync(self._open.get(fh) or await self._open.find(fh), data_only=datasync)
            if self._open.has_losses:
                await self._open.wait_for_dropped_losses()
            self._open.report_loss_to_fsync(fh, *number)

    @answer_request
    async def release(self, fh: int) -> None:
        if is_virtual_handle(fh):
            self._virtual.release(fh)
            return
        ino = fusewire.node()
        if not await self._open.release(fh):
            await self._volume.left_open.close_unknown(ino)

    # -- directories ---------------------------------------------------------------------------------

    @answer_request
    async def opendir(self, inode: int, ctx: RequestContext) -> int:
        if not is_virtual(inode):
            await self._volume.tree.open_directory(inode)
        return inode | (next(self._readers) % READERS << READER_BIT) if inode < 1 << READER_BIT else inode

    @answer_request
    async def readdir(self, fh: int, start_id: int, token: ReaddirToken) -> None:
        """Cookies 1 and 2 are "." and "..", which count as no lookup; the others are the volume's."""
        ino, reader = _directory_of(fh), fh >> READER_BIT
        if start_id < 2 and not await self._reply_dots(ino, start_id, token):
            return
        cookie = start_id if start_id > 2 else 0
        self._let_keep(ino, means_directory=True)  # from before they are read
        limit, left, size = LISTING_BATCH, LISTING_BYTES, LISTED_BYTES
        while True:
            rows = (
                self._virtual.list_files(cookie)
                if is_virtual(ino)
                else await self._volume.tree.list_directory(ino, cookie, limit, reader)
            )
            directories, others = (self._let_keep(ino, means_directory=means) for means in (True, False))
            for entry in rows:
                name, cookie, attributes = entry
                timeout = directories if stat.S_ISDIR(attributes.mode) else others
                if not pyfuse3.readdir_reply(token, name, self._fill_attributes(attributes, timeout), cookie):
                    return
                if not is_virtual(attributes.ino):
                    self._volume.tree.remember(ino, entry)
                size = LISTED_BYTES + len(name)
                left -= size
            if len(rows) < limit:
                return
            limit = min(LISTING_BATCH, max(LISTING_BATCH_MIN, left // size + 1))  # what does not fit is read again

    async def _reply_dots(self, ino: int, start_id: int, token: ReaddirToken) -> bool:
        """Report "." and ".." after ``start_id``; False when the buffer is full."""
        if start_id < 1 and not pyfuse3.readdir_reply(token, b".", self._fill_attributes(await self._stat(ino)), 1):
            return False
        if is_virtual(ino):
            parent = await self._volume.inodes.attributes(ROOT_INODE)
        else:
            parent = await self._volume.tree.lookup(ino, b"..")
            self._volume.tree.forget(parent.ino, 1)
        return pyfuse3.readdir_reply(token, b"..", self._fill_attributes(parent), 2)

    @answer_request
    async def releasedir(self, fh: int) -> None:
        self._volume.tree.close_directory(fh >> READER_BIT)

    @answer_request
    async def fsyncdir(self, fh: int, datasync: bool) -> None:
        if not is_virtual(_directory_of(fh)):
            await self._volume.inodes.fsync_directory(_directory_of(fh))

    # -- extended attributes -------------------------------------------------------------------------

    @answer_request
    async def getxattr(self, inode: int, name: bytes, ctx: RequestContext) -> bytes:
        sought = fusewire.sought()
        if is_virtual(inode):
            raise errors.NoAttribute(os.fsdecode(name))
        if sought is not None:
            return (await self._volume.inodes.seek(inode, sought[0], data=sought[1])).to_bytes(8, sys.byteorder)
        if name == INFO_XATTR:
            return json.dumps(await self._volume.inodes.info(inode)).encode()
        return await self._volume.inodes.get_xattr(inode, name)

    @answer_request
    async def setxattr(self, inode: int, name: bytes, value: bytes, ctx: RequestContext) -> None:
        _refuse_virtual(inode)
        if name == INFO_XATTR:
            raise errors.NotPermitted(f"{os.fsdecode(name)} is the daemon's own")
        await self._volume.inodes.set_xattr(inode, name, value, Caller(ctx.uid, ctx.gid, ctx.pid))

    @answer_request
    async def listxattr(self, inode: int, ctx: RequestContext) -> Sequence[bytes]:
        names = [] if is_virtual(inode) else await self._volume.inodes.list_xattrs(inode)
        hidden = [name for name in names if name.startswith(ROOT_XATTRS)]
        if hidden and not (ctx.uid == 0 and Credentials.of(ctx.pid, ctx.uid).has(Capability.SYS_ADMIN)):
            return [name for name in names if name not in hidden]
        return names

    @answer_request
    async def removexattr(self, inode: int, name: bytes, ctx: RequestContext) -> None:
        _refuse_virtual(inode)
        await self._once.remove_xattr(inode, name, Caller(ctx.uid, ctx.gid, ctx.pid))

    # -- the whole -----------------------------------------------------------------------------------

    @answer_request
    async def statfs(self, ctx: RequestContext) -> StatvfsData:
        space = self._volume.space()
        figures = StatvfsData()
        figures.f_bsize = figures.f_frsize = BLOCK_SIZE
        figures.f_blocks = space.size // BLOCK_SIZE
        figures.f_bfree = figures.f_bavail = space.free // BLOCK_SIZE
        figures.f_files = space.files
        figures.f_ffree = figures.f_favail = space.files_free
        figures.f_namemax = NAME_MAX
        return figures
