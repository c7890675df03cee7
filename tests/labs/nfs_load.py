"""Programs of an NFS client, by libnfs, beside which a server or what it exports is killed: no call may fail.

``python nfs_load.py URL SEED`` works on files of its own until its standard input ends, verifies all that it reads,
and prints a line for each round. Another program than the tests, as it runs in another network namespace.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import random
import select
import sys

PIECE = 256 << 10
"""bytes of a call: libnfs encodes no much larger ones"""
BLOCK = 64 << 10
BLOCKS_MAX = 24


class NfsUrl(ctypes.Structure):
    _fields_ = [(name, ctypes.c_char_p) for name in ("server", "path", "file")]


class NfsClient:
    """The export of a URL, mounted by libnfs. Every method raises OSError as the call of that name does."""

    def __init__(self, url: str) -> None:
        name = ctypes.util.find_library("nfs")
        assert name is not None, "libnfs is not installed"
        self._lib = ctypes.CDLL(name)
        for call in ("nfs_init_context", "nfs_parse_url_dir"):
            getattr(self._lib, call).restype = ctypes.c_void_p
        self._lib.nfs_get_error.restype = ctypes.c_char_p
        self._context = ctypes.c_void_p(self._lib.nfs_init_context())
        parsed = self._lib.nfs_parse_url_dir(self._context, url.encode())
        assert parsed, url
        place = ctypes.cast(parsed, ctypes.POINTER(NfsUrl)).contents
        self._call("nfs_mount", place.server, place.path)

    def _call(self, name: str, *words: object) -> int:
        result = int(getattr(self._lib, name)(self._context, *words))
        if result < 0:
            raise OSError(-result, f"{name}{words}: {self._lib.nfs_get_error(self._context)!r}")
        return result

    def open(self, path: str, flags: int, mode: int = 0o644) -> ctypes.c_void_p:
        """With O_CREAT the file must not exist."""
        handle = ctypes.c_void_p()
        if flags & os.O_CREAT:
            self._call("nfs_creat", path.encode(), mode, ctypes.byref(handle))
        else:
            self._call("nfs_open", path.encode(), flags, ctypes.byref(handle))
        return handle

    def close(self, handle: ctypes.c_void_p) -> None:
        self._call("nfs_close", handle)

    def pwrite(self, handle: ctypes.c_void_p, content: bytes, offset: int) -> None:
        size, done = len(content), 0
        while done < size:
            part = content[done : done + PIECE]
            done += self._call(
                "nfs_pwrite", handle, ctypes.c_uint64(offset + done), ctypes.c_uint64(len(part)), ctypes.c_char_p(part)
            )

    def pread(self, handle: ctypes.c_void_p, size: int, offset: int) -> bytes:
        buffer, done = ctypes.create_string_buffer(size), 0
        while done < size:
            place = ctypes.byref(buffer, done)
            count = min(size - done, PIECE)
            read = self._call("nfs_pread", handle, ctypes.c_uint64(offset + done), ctypes.c_uint64(count), place)
            if not read:
                break
            done += read
        return buffer.raw[:done]

    def fsync(self, handle: ctypes.c_void_p) -> None:
        self._call("nfs_fsync", handle)

    def rename(self, source: str, target: str) -> None:
        self._call("nfs_rename", source.encode(), target.encode())

    def unlink(self, path: str) -> None:
        self._call("nfs_unlink", path.encode())

    def mkdir(self, path: str) -> None:
        self._call("nfs_mkdir", path.encode())


class Load:
    """A few files, and what is in them."""

    def __init__(self, client: NfsClient, folder: str, rng: random.Random) -> None:
        self._client, self._folder, self._rng = client, folder, rng
        self._files: dict[str, bytes] = {}
        self._number = 0
        client.mkdir(folder)

    def run_round(self) -> None:
        self._rng.choice([self.make, self.rewrite, self.move, self.remove, self.verify])()

    def _pick(self) -> str | None:
        return self._rng.choice(sorted(self._files)) if self._files else None

    def _new_name(self) -> str:
        self._number += 1
        return f"{self._folder}/{self._number}"

    def make(self) -> None:
        if len(self._files) > 20:
            return self.remove()
        name, content = self._new_name(), self._rng.randbytes(self._rng.randrange(1, BLOCKS_MAX * BLOCK))
        handle = self._client.open(name, os.O_CREAT)
        self._client.pwrite(handle, content, 0)
        if self._rng.random() < 0.2:
            self._client.fsync(handle)
        self._client.close(handle)
        self._files[name] = content
        return None

    def rewrite(self) -> None:
        if (name := self._pick()) is None:
            return
        content, part = self._files[name], self._rng.randbytes(self._rng.randrange(1, 4 * BLOCK))
        offset = self._rng.randrange(len(content))
        handle = self._client.open(name, os.O_RDWR)
        self._client.pwrite(handle, part, offset)
        self._files[name] = content[:offset] + part + content[offset + len(part) :]
        assert self._client.pread(handle, len(part), offset) == part, f"{name} at {offset}"
        self._client.close(handle)

    def move(self) -> None:
        if (name := self._pick()) is not None:
            target = self._pick() if self._rng.random() < 0.3 else self._new_name()
            if target != name and target is not None:
                self._client.rename(name, target)
                self._files[target] = self._files.pop(name)

    def remove(self) -> None:
        if (name := self._pick()) is not None:
            self._client.unlink(name)
            del self._files[name]

    def verify(self) -> None:
        if (name := self._pick()) is not None:
            self.compare(name)

    def compare(self, name: str) -> None:
        content = self._files[name]
        handle = self._client.open(name, os.O_RDONLY)
        assert self._client.pread(handle, len(content) + 1, 0) == content, name
        self._client.close(handle)

    def compare_all(self) -> None:
        for name in self._files:
            self.compare(name)


def main(url: str, seed: str) -> None:
    load = Load(NfsClient(url), f"/load-{seed}", random.Random(seed))
    while not select.select([sys.stdin], [], [], 0)[0]:
        load.run_round()
        print("round", flush=True)
    load.compare_all()
    print("done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
