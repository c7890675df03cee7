"""The one table from the project's errors to the errno values that both doors answer with."""

from __future__ import annotations

import errno

from kvfuse import errors

ERRNO: dict[type[Exception], int] = {
    errors.NotFound: errno.ENOENT,
    errors.Exists: errno.EEXIST,
    errors.NotADirectory: errno.ENOTDIR,
    errors.IsADirectory: errno.EISDIR,
    errors.NotEmpty: errno.ENOTEMPTY,
    errors.InvalidArgument: errno.EINVAL,
    errors.PermissionDenied: errno.EACCES,
    errors.NotPermitted: errno.EPERM,
    errors.NameTooLong: errno.ENAMETOOLONG,
    errors.TooManyLinks: errno.EMLINK,
    errors.NoAttribute: errno.ENODATA,
    errors.NoSuchOffset: errno.ENXIO,
    errors.AttributeTooLarge: errno.E2BIG,
    errors.Unsupported: errno.EOPNOTSUPP,
    errors.Stale: errno.ESTALE,
    errors.BadHandle: errno.EBADF,
    errors.FileTooLarge: errno.EFBIG,
    errors.ReadOnly: errno.EROFS,
    errors.NoSpace: errno.ENOSPC,
    errors.QuotaExceeded: errno.EDQUOT,
    errors.NotAdmitted: errno.ECANCELED,
    errors.CrossesNamespaces: errno.EXDEV,
    errors.TooDeep: errno.EXDEV,
    errors.EngineFull: errno.ENOSPC,
    errors.EngineReadOnly: errno.EROFS,
    errors.EngineTimeout: errno.ETIMEDOUT,
    errors.KvfuseError: errno.EIO,
}
"""An error is answered by its own row, or by that of its nearest base class."""


def errno_of(error: Exception) -> int | None:
    """The errno that answers ``error``; None for one that is not the project's own."""
    return next((ERRNO[kind] for kind in type(error).__mro__ if kind in ERRNO), None)
