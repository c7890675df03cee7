"""Loads a model with one loader, into memory that is there already. A program for the loader's own environment.

    python loaders.py LOADER FILE...

It prints a line once it is ready. Each line on stdin is a request for one load, answered by a line of JSON: seconds,
seconds of its processor, and `check_of` the tensors of each file. Every load ends with all tensors in memory that
nothing else changes, as an engine's weights are: what a loader hands out over memory of its own, or over a mapping, is
copied from there.
"""

from __future__ import annotations

import importlib
import json
import mmap
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
PIECE = 4 << 20
THREADS = 4
PAGE = 4096


class Shard(NamedTuple):
    """A safetensors file."""

    path: str
    start: int
    """where its tensors begin"""
    size: int
    """bytes of them"""
    offsets: dict[str, tuple[int, int]]
    """name of a tensor -> where it begins and ends, from ``start``"""


def read_header(path: str) -> Shard:
    """What the file has."""
    with open(path, "rb", buffering=0) as file:
        length = int.from_bytes(file.read(8), "little")
        tensors = json.loads(file.read(length))
    offsets = {name: tuple(row["data_offsets"]) for name, row in tensors.items() if name != "__metadata__"}
    return Shard(path, 8 + length, max(end for _, end in offsets.values()), offsets)


def check_of(data: Bytes) -> int:
    """A number that differs where bytes do, or pages changed places. ``data``: whole pages."""
    pages = data.view(np.uint64).reshape(-1, PAGE // 8).sum(axis=1)
    return int((pages * np.arange(1, 2 * len(pages), 2, dtype=np.uint64)).sum())


class Load(ABC):
    """Loads files into memory."""

    modules: tuple[str, ...] = ()
    """imported before the first load"""

    def __init__(self, paths: Sequence[str]) -> None:
        for module in self.modules:
            importlib.import_module(module)
        self.shards = [read_header(path) for path in paths]
        self.targets = [self.memory(shard.size) for shard in self.shards]

    def memory(self, size: int) -> Bytes:
        return np.full(size, 0xFF, np.uint8)

    @abstractmethod
    def run(self) -> None:
        """Fill the memory with the tensors of each file."""

    def tensors(self, number: int) -> dict[str, Any]:
        """Tensors of bytes over the memory of a file."""
        torch = importlib.import_module("torch")
        target = self.targets[number]
        return {name: torch.from_numpy(target[low:high]) for name, (low, high) in self.shards[number].offsets.items()}

    def pieces(self) -> Iterator[tuple[int, int, Bytes]]:
        """(number of the file, offset in it, memory)."""
        for number, (shard, target) in enumerate(zip(self.shards, self.targets, strict=True)):
            for low in range(0, shard.size, PIECE):
                yield number, shard.start + low, target[low : min(shard.size, low + PIECE)]


class Memcpy(Load):
    """The reference: one thread copies memory."""

    def __init__(self, paths: Sequence[str]) -> None:
        super().__init__(paths)
        self._sources = [np.fromfile(shard.path, np.uint8, shard.size, offset=shard.start) for shard in self.shards]

    def run(self) -> None:
        for source, target in zip(self._sources, self.targets, strict=True):
            np.copyto(target, source)


class Preads(Load):
    """Threads that read into the memory."""

    def run(self) -> None:
        files = [os.open(shard.path, os.O_RDONLY) for shard in self.shards]

        def read(piece: tuple[int, int, Bytes]) -> None:
            number, offset, memory = piece
            done = 0
            while done < len(memory):
                count = os.preadv(files[number], [memory[done:].data], offset + done)
                if not count:
                    raise EOFError(f"{self.shards[number].path} is shorter than its header says")
                done += count

        with ThreadPoolExecutor(THREADS) as pool:
            for _ in pool.map(read, self.pieces()):
                pass
        for file in files:
            os.close(file)


class Mapping(Load):
    """One thread that copies from mappings."""

    def run(self) -> None:
        for shard, target in zip(self.shards, self.targets, strict=True):
            with open(shard.path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapping:
                source = np.frombuffer(mapping, np.uint8)
                for low, high in shard.offsets.values():
                    target[low:high] = source[shard.start + low : shard.start + high]
                del source


def _put(tensor: Any, target: Any) -> None:
    target.copy_(tensor.reshape(-1).view(target.dtype))


class Safetensors(Load):
    """What vLLM and transformers do: `safe_open`, tensor after tensor."""

    modules = ("torch", "safetensors")

    def run(self) -> None:
        safe_open = importlib.import_module("safetensors").safe_open
        for number, shard in enumerate(self.shards):
            memory = self.tensors(number)
            with safe_open(shard.path, framework="pt", device="cpu") as file:
                for name in memory:
                    _put(file.get_tensor(name), memory[name])


class RunaiStreamer(Load):
    """Run:ai's streamer, with its own settings."""

    modules = ("torch", "runai_model_streamer")

    def run(self) -> None:
        memory: dict[str, Any] = {}
        for number in range(len(self.shards)):
            memory |= self.tensors(number)
        with importlib.import_module("runai_model_streamer").SafetensorsStreamer() as streamer:
            streamer.stream_files([shard.path for shard in self.shards])
            for name, tensor in streamer.get_tensors():
                _put(tensor, memory[name])


class Fastsafetensors(Load):
    """Without a GPU: its copier through memory of the host."""

    modules: tuple[str, ...] = ("torch", "fastsafetensors")

    def run(self) -> None:
        library = importlib.import_module("fastsafetensors")
        self.copy_by(library.SafeTensorsFileLoader(library.SingleGroup(), device="cpu", nogds=True))

    def copy_by(self, loader: Any) -> None:
        loader.add_filenames({0: [shard.path for shard in self.shards]})
        buffers = loader.copy_files_to_device()
        for number in range(len(self.shards)):
            for name, memory in self.tensors(number).items():
                _put(buffers.get_tensor(name), memory)
        buffers.close()
        loader.close()


class FastsafetensorsRings(Fastsafetensors):
    """Its loader for 3FS, whose reader is that of compat/fastsafetensor-3fs-reader."""

    modules = ("torch", "fastsafetensors.threefs_loader", "fastsafetensor_3fs_reader")

    def run(self) -> None:
        library = importlib.import_module("fastsafetensors.threefs_loader")
        root = importlib.import_module("fastsafetensor_3fs_reader").extract_mount_point(self.shards[0].path)
        self.copy_by(library.ThreeFSLoader(None, device="cpu", mount_point=root))


class Rings(Load):
    """kvfuse's own reader, into memory that the daemon fills."""

    once = False

    def __init__(self, paths: Sequence[str]) -> None:
        self._reader = importlib.import_module("kvfuse.connectors.models").WeightReader(paths[0], once=self.once)
        super().__init__(paths)

    def memory(self, size: int) -> Bytes:
        found: Bytes = self._reader.memory(size)
        return found

    def run(self) -> None:
        for shard, target in zip(self.shards, self.targets, strict=True):
            if self._reader.read_into(shard.path, shard.start, target) != shard.size:
                raise EOFError(f"{shard.path} is shorter than its header says")


class RingsOnce(Rings):
    """The same, past the page cache of the disk."""

    once = True


LOADERS: dict[str, Callable[[Sequence[str]], Load]] = {
    "safetensors": Safetensors,
    "mmap": Mapping,
    "runai streamer": RunaiStreamer,
    "fastsafetensors": Fastsafetensors,
    "fastsafetensors 3fs": FastsafetensorsRings,
    "preads": Preads,
    "ring": Rings,
    "ring once": RingsOnce,
    "memcpy": Memcpy,
}
ON_RINGS = "fastsafetensors 3fs", "ring", "ring once"
"""those that need a kvfuse mount"""


def main() -> None:
    """Serve requests."""
    name, *paths = sys.argv[1:]
    load = LOADERS[name](paths)
    print("ready", flush=True)
    for _ in sys.stdin:
        began, used = time.perf_counter(), time.process_time()
        load.run()
        seconds, processor = time.perf_counter() - began, time.process_time() - used
        checks = [check_of(target) for target in load.targets]
        print(json.dumps({"seconds": seconds, "processor": processor, "checks": checks}), flush=True)
        for target in load.targets:
            target[:] = 0xFF


if __name__ == "__main__":
    main()
