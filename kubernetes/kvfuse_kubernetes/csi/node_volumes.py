"""The kvfuse mounts of a node, namespaces in them, and binds of these to the kubelet's paths. Nothing is remembered.

The kernel's mount table says each time what is bound where, so a plug-in that was killed at any step goes on when the
kubelet repeats its request.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

from kvfuse.cli import Failure
from kvfuse.cli.mounts import read_virtual
from kvfuse.cli.namespace import CLEAR, read_settings, write_settings
from kvfuse.mounttable import DEAD, FILE_SYSTEM, Mounted, all_mounts
from kvfuse.sizes import parse_size
from kvfuse_kubernetes.csi import safe_paths
from kvfuse_kubernetes.csi.safe_paths import by_descriptor, opened_beneath, opened_root
from kvfuse_kubernetes.csi.volume_words import EPHEMERAL_FOLDER, SIZES, WantedVolume, WrongRequest

MOUNT_FOLDER = "mnt"
"""of a volume's folder: its mount point"""
RINGS_FOLDER = ".kvfuse"
"""of a mount: the folder with the socket of rings; also of a pod's volume with rings"""
KEPT_FLAGS = safe_paths.MS_RDONLY | safe_paths.MS_NOEXEC
"""flags of a volume's mount that its binds have, too; statvfs(2) has the numbers of mount(2)"""
NEW_KIND = "files"
"""kind of a namespace whose volume says none: no file goes by itself"""


class NotMounted(Exception):
    """A volume is not mounted on this node, or its daemon is gone: the kubelet is to try again."""


class Conflict(Exception):
    """What is there contradicts what is asked for."""


class NodeVolumes:
    """The mounts at ``volumes``/NAME/mnt, and binds below ``kubelet``, the kubelet's folder."""

    def __init__(self, volumes: Path, kubelet: Path) -> None:
        self.volumes, self.kubelet = volumes, kubelet

    def names(self) -> list[str]:
        """Names of the volumes that are mounted."""
        points = {row.point for row in all_mounts() if row.file_system == FILE_SYSTEM}
        return sorted(point.parent.name for point in points if point == self._point(point.parent.name))

    def _point(self, volume: str) -> Path:
        return self.volumes / volume / MOUNT_FOLDER

    def mounted(self, volume: str) -> Mounted:
        """The mount of a volume. NotMounted."""
        point = self._point(volume)
        row = published_at(point)
        if row is None or row.file_system != FILE_SYSTEM:
            raise NotMounted(f"volume {volume!r} is not mounted on this node: no kvfuse mount at {point}")
        return row

    @contextmanager
    def _root(self, volume: str) -> Iterator[int]:
        """The root of a mount whose daemon answers. NotMounted."""
        point = self.mounted(volume).point
        with opened_root(point) as root:
            try:
                os.statvfs(by_descriptor(root))
            except OSError as error:
                if error.errno not in DEAD:
                    raise
                raise NotMounted(f"the daemon of {point} is gone: mount volume {volume!r} again") from error
            yield root

    # -- binds ---------------------------------------------------------------------------------------

    def publish(self, wanted: WantedVolume, target: str) -> None:
        """Bind a namespace, which is made if it is absent, to ``target``.

        NotMounted, Conflict, WrongRequest; OSError; `Failure` with the daemon's reason against a setting.
        """
        path = self._below_kubelet(target)
        with self._root(wanted.volume) as root, opened_root(self.kubelet) as kubelet:
            make_namespace(root, wanted)
            safe_paths.make_folders(kubelet, path, 0o750)
            if not self._is_published(wanted, target):
                with opened_beneath(root, wanted.namespace) as source, opened_beneath(kubelet, path) as point:
                    safe_paths.bind(source, point)
            with opened_beneath(kubelet, path) as top:
                if wanted.has_rings:
                    _bind_rings(root, top, Path(target))
                # Also those of the volume's mount, which a bind with flags of its own would lack.
                safe_paths.set_flags(top, _flags_of(wanted) | os.statvfs(by_descriptor(root)).f_flag & KEPT_FLAGS)

    def _is_published(self, wanted: WantedVolume, target: str) -> bool:
        """Whether the bind stands. One of an earlier mount of the volume is taken away. Conflict with another one."""
        row = published_at(Path(target))
        if row is None:
            return False
        mounted = self.mounted(wanted.volume)
        if (row.device, row.root) == (mounted.device, f"/{wanted.namespace}"):
            return True
        if row.device != mounted.device and row.file_system == FILE_SYSTEM:
            self.unpublish(target)
            with opened_root(self.kubelet) as kubelet:
                safe_paths.make_folders(kubelet, self._below_kubelet(target), 0o750)
            return False
        raise Conflict(f"{target} has {row.root} of {row.source} already, not {wanted.name}")

    def unpublish(self, target: str) -> Mounted | None:
        """Take the bind and its folder away. What was bound; None: nothing was. OSError, WrongRequest."""
        path, row = PurePosixPath(self._below_kubelet(target)), None
        with suppress(FileNotFoundError), opened_root(self.kubelet) as kubelet:
            while (found := published_at(Path(target))) is not None:
                row = found
                with opened_beneath(kubelet, str(path)) as top:
                    safe_paths.detach(top)
            with opened_beneath(kubelet, str(path.parent)) as folder:
                os.rmdir(path.name, dir_fd=folder)
        return row

    def _below_kubelet(self, target: str) -> str:
        """The path relative to the kubelet's folder. WrongRequest where it is no plain path below that."""
        path = PurePosixPath(target)
        if str(path) != target or ".." in path.parts or not path.parent.is_relative_to(self.kubelet / "pods"):
            raise WrongRequest(f"target path {target!r} is not a plain path below {self.kubelet}/pods")
        return str(path.relative_to(self.kubelet))

    # -- namespaces ----------------------------------------------------------------------------------

    def remove_namespace(self, volume: str, namespace: str) -> bool:
        """Remove a namespace and all in it; False: there was none. NotMounted, OSError."""
        path = PurePosixPath(namespace)
        with self._root(volume) as root, suppress(FileNotFoundError), opened_beneath(root, str(path.parent)) as folder:
            with opened_beneath(folder, path.name) as made, suppress(OSError):
                os.setxattr(by_descriptor(made), CLEAR, b"now")  # one of kind blocks is empty at once
            shutil.rmtree(path.name, dir_fd=folder)
            return True
        return False

    def remove_ephemeral(self, volume_id: str, source: str | None) -> bool:
        """Remove the namespace of a pod that ended; False: there was none.

        ``source``: that of its volume; None: it is not known, and all mounted volumes are looked at. NotMounted where
        the volume is not mounted, or its daemon is gone.
        """
        namespace = f"{EPHEMERAL_FOLDER}/{volume_id}"
        names = [name for name in self.names() if source in (None, self.mounted(name).source)]
        if source is not None and not names:
            raise NotMounted(f"{source}, which has its namespace {namespace}, is not mounted on this node")
        return True in [self.remove_namespace(name, namespace) for name in names]

    def usage(self, path: str) -> dict[str, int]:
        """Capacity, use (bytes) and files of the namespace bound to ``path``. NotMounted, Conflict, MountError."""
        row = published_at(Path(path))
        if row is None or row.file_system != FILE_SYSTEM:
            raise Conflict(f"no kvfuse volume is published at {path}")
        points = [found.point for found in all_mounts() if (found.device, found.root) == (row.device, "/")]
        if not points:
            raise NotMounted(f"{row.source} is not mounted on this node any more: the daemon of {path} is gone")
        for found in read_virtual(points[0], "stats")["namespaces"]:
            if found["path"] == row.root:
                used = found["used"]
                return {"capacity": found["capacity"], "used": used["bytes"], "files": used["files"]}
        raise Conflict(f"{row.root} of {row.source} is no namespace any more")


def published_at(path: Path) -> Mounted | None:
    """What is mounted at a path; of several the topmost. The mount is not touched."""
    found = [row for row in all_mounts() if row.point == path]
    return found[-1] if found else None


def make_namespace(root: int, wanted: WantedVolume) -> None:
    """Make a namespace below a volume's root, or give the present one the settings. `Failure`, OSError."""
    path = PurePosixPath(wanted.namespace)
    safe_paths.make_folders(root, str(path.parent), 0o755)
    with opened_beneath(root, str(path.parent)) as folder:
        is_new = True
        try:
            os.mkdir(path.name, dir_fd=folder)
        except FileExistsError:
            is_new = False
        with opened_beneath(folder, path.name) as made:
            try:
                _settle(by_descriptor(made), wanted)
            except BaseException:
                if is_new:
                    os.rmdir(path.name, dir_fd=folder)
                raise
            if is_new:
                os.chmod(by_descriptor(made), wanted.mode)


def _settle(path: Path, wanted: WantedVolume) -> None:
    """Make a folder a namespace, or change settings that differ. `Failure`: the daemon's reason."""
    present = read_settings(path)
    settings = {"kind": NEW_KIND, **wanted.settings} if present is None else _different(wanted.settings, present)
    if not settings:
        return
    try:
        write_settings(path, settings)
    except Failure as failure:
        reason = failure.message.removeprefix(f"{path}: ")
        raise Failure(f"namespace {wanted.namespace} of volume {wanted.volume}: {reason}") from failure


def _different(wanted: Mapping[str, str], present: Mapping[str, str]) -> dict[str, str]:
    def value(name: str, text: str) -> int | str:
        return parse_size(text) if name in SIZES else text

    return {name: text for name, text in wanted.items() if value(name, text) != value(name, present.get(name, "0"))}


def _flags_of(wanted: WantedVolume) -> int:
    flags = safe_paths.MS_NOSUID | safe_paths.MS_NODEV
    flags |= safe_paths.MS_RDONLY if wanted.is_read_only else 0
    return flags | (safe_paths.MS_NOEXEC if wanted.no_exec else 0)


def _bind_rings(root: int, top: int, target: Path) -> None:
    """Bind the folder with the socket into the pod's volume: ring clients look for it there."""
    if published_at(target / RINGS_FOLDER) is not None:
        return
    with suppress(FileExistsError):
        os.mkdir(RINGS_FOLDER, 0o755, dir_fd=top)
    with opened_beneath(root, RINGS_FOLDER) as source, opened_beneath(top, RINGS_FOLDER) as point:
        safe_paths.bind(source, point)
