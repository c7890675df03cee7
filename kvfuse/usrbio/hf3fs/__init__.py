"""3FS's ring calls over a kvfuse mount. `api` says what each does."""

from kvfuse.usrbio.hf3fs.api import (
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
    "hardlink",
    "ioring",
    "iovec",
    "make_ioring",
    "make_iovec",
    "punch_hole",
    "read_file",
    "register_fd",
]
