"""The project's own errors.

Rooms below the doors raise these and never an errno; ``fs/ops.py`` holds the one table that turns
them into errno values, the command line prints their message. A message says what happened, to
which object, and - where there is a remedy - what to do.
"""

from errno import EIO, EPIPE


class KvfuseError(Exception):
    """Base of every error this project raises on purpose."""


# -- a volume cannot be opened, made or mounted (the command line's errors) --------------------------


class ConfigError(KvfuseError):
    """mount.conf or an option is wrong: names the key, the line and the nearest known key."""


class VolumeError(KvfuseError):
    """A volume folder cannot be used: absent, not a volume, of a newer format, damaged."""


class VolumeBusy(VolumeError):
    """Another daemon holds the volume: the message says which (pid, host, mount point)."""


class MountError(KvfuseError):
    """The mount point or the machine does not allow the mount."""


class ClusterError(KvfuseError):
    """A server started for trying or for tests does not start, answer or end: the message has the end of its log."""


# -- an operation on names and files cannot be done --------------------------------------------------


class OperationError(KvfuseError):
    """Base of errors that answer one file-system operation."""


class NotFound(OperationError):
    """The name does not exist."""


class Exists(OperationError):
    """The name exists already."""


class NotADirectory(OperationError):
    """A directory was needed."""


class IsADirectory(OperationError):
    """Something other than a directory was needed."""


class NotEmpty(OperationError):
    """The directory still has entries."""


class InvalidArgument(OperationError):
    """The request makes no sense for this object."""


class PermissionDenied(OperationError):
    """The caller may not do this (EACCES)."""


class NotPermitted(OperationError):
    """The operation is not permitted on this object, whoever asks (EPERM)."""


class NameTooLong(OperationError):
    """A name is longer than 255 bytes, or a symlink target longer than 4095."""


class TooManyLinks(OperationError):
    """The inode has as many hard links as it may have."""


class NoAttribute(OperationError):
    """The extended attribute does not exist."""


class NoSuchOffset(OperationError):
    """The file has no data, or no hole, at or behind an offset."""


class AttributeTooLarge(OperationError):
    """An extended attribute's name or value is over its limit."""


class Unsupported(OperationError):
    """The operation is not offered."""


class Stale(OperationError):
    """The inode is gone."""


class BadHandle(OperationError):
    """The handle is not open, or not open for this."""


class FileTooLarge(OperationError):
    """The offset or size is beyond what a file may have."""


class ReadOnly(OperationError):
    """The volume is mounted read-only."""


class NoSpace(OperationError):
    """The volume's promised capacity is used."""

    namespace: int | None = None
    """whose capacity is used; None: the volume's"""


class QuotaExceeded(NoSpace):
    """The namespace's promised capacity is used."""

    def __init__(self, message: str, namespace: int | None = None) -> None:
        super().__init__(message)
        self.namespace = namespace


class NotAdmitted(OperationError):
    """The cache is full, and its policy does not find the block worth the eviction of others."""


class CrossesNamespaces(OperationError):
    """A link or a rename from one namespace to another."""


class TooDeep(OperationError):
    """A directory cannot be moved to where it is to be in one step. Whoever asks may copy it instead."""


# -- an engine failed --------------------------------------------------------------------------------


class EngineError(OperationError):
    """A record or segment engine failed. What was asked may or may not have happened."""


class EngineFull(EngineError):
    """The medium below an engine has no space left (the disk, not the volume's capacity)."""


class EngineReadOnly(EngineError):
    """The file system below an engine is read-only, or an error of its disk has turned it so."""


class EngineTimeout(EngineError):
    """A deadline passed; a write that timed out is *unknown*, never "did not happen"."""


class MediumError(EngineError):
    """The medium does not give bytes that it had: a bad sector, a file that was cut."""


class Corrupt(EngineError):
    """Bytes do not match their checksum; the message names the segment and the offset."""


# -- the rings' client -------------------------------------------------------------------------------


class Disconnected(KvfuseError):
    """The daemon behind a ring is gone, or does not keep to the protocol. `Client.reconnect` once it is back."""

    errno = EPIPE


class DeviceError(KvfuseError):
    """A GPU, its driver, or memory that is said to be a GPU's does not do what was asked of it."""

    errno = EIO


def innermost(error: BaseException) -> BaseException:
    """A failure out of the groups that nurseries wrapped it in; of several at once, the first one."""
    return innermost(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error
