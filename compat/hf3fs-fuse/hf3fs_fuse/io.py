"""The calls of 3FS's ring module, served by a kvfuse mount: all of it is in `kvfuse.usrbio.hf3fs`."""

import multiprocessing.shared_memory  # noqa: F401  engines reach SharedMemory through this import

from kvfuse.usrbio import hf3fs as h3fio
from kvfuse.usrbio.hf3fs import (
    IorPriority,
    deregister_fd,
    extract_mount_point,
    force_fsync,
    hardlink,
    ioring,
    iovec,
    make_ioring,
    make_iovec,
    punch_hole,
    read_file,
    register_fd,
)

__all__ = [
    "IorPriority",
    "deregister_fd",
    "extract_mount_point",
    "force_fsync",
    "h3fio",
    "hardlink",
    "ioring",
    "iovec",
    "make_ioring",
    "make_iovec",
    "punch_hole",
    "read_file",
    "register_fd",
]
