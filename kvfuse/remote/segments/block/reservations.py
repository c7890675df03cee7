"""Persistent reservations (SCSI, NVMe): a device refuses writes of hosts that are not registered. Calls for threads.

Each client registers a key, drawn by lot. All registered clients together hold one reservation, "write exclusive, all
registrants". A client that is gone is cut off by taking its key away: the device refuses its further writes. What is
inside the device by then still happens, so this is no reason to write to its slots at once.

The kernel answers with an errno, or with a positive status of NVMe, which ``fcntl.ioctl`` returns for a buffer that may
be changed alone.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct

KEY_SIZE = 8
ALL_REGISTRANTS = 5
"""write exclusive, in the kernel's numbers"""
IGNORE_KEY = 1
"""whatever was registered before"""
REGISTRATION = struct.Struct("<8s 8s I 4x")
"""old key, new key, flags"""
RESERVATION = struct.Struct("<8s I I")
"""key, type, flags"""
PREEMPTION = struct.Struct("<8s 8s I I")
"""own key, the other's, type, flags"""


def _request(number: int, fields: struct.Struct) -> int:
    """As the kernel's _IOW('p', ...)."""
    return 1 << 30 | fields.size << 16 | ord("p") << 8 | number


REGISTER, RESERVE = _request(200, REGISTRATION), _request(201, RESERVATION)
PREEMPT_ABORT = _request(204, PREEMPTION)
NVME_CONFLICT = 0x83
_UNSUPPORTED = frozenset({errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL})
NO_KEY = bytes(KEY_SIZE)


def new_key() -> bytes:
    """Never zero, which means none."""
    key = NO_KEY
    while key == NO_KEY:
        key = os.urandom(KEY_SIZE)
    return key


def register(fd: int, key: bytes) -> bool:
    """Be one of those who may write. False: the device has no reservations. OSError; EBADE: others have it alone."""
    try:
        _call(fd, REGISTER, REGISTRATION.pack(NO_KEY, key, IGNORE_KEY))
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            return False
        raise
    _call(fd, RESERVE, RESERVATION.pack(key, ALL_REGISTRANTS, 0))
    return True


def cut_off(fd: int, key: bytes, other: bytes) -> None:
    """Have writes of the client with that key refused, if it is registered. OSError."""
    try:
        _call(fd, PREEMPT_ABORT, PREEMPTION.pack(key, other, ALL_REGISTRANTS, 0))
    except OSError as error:
        if error.errno != errno.EBADE:  # it is not registered any more
            raise


def _call(fd: int, request: int, image: bytes) -> None:
    status = fcntl.ioctl(fd, request, bytearray(image))
    if status:
        code = errno.EBADE if status & 0xFFF == NVME_CONFLICT else errno.EOPNOTSUPP if status & 0xFF == 1 else errno.EIO
        raise OSError(code, os.strerror(code))
