"""UCM's own factory, driven by a test through `engine_host`. Its native modules are not built: the log is Python's, and
copies from and to a device are memmove."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import sys
import types
from typing import Any

import numpy as np
from engine_host import DEADLINE_S, serve


class _Native(types.ModuleType):
    """Stands for a native module: any name is a class that does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__getattr__": lambda self, name: 0, "DEBUG": 0, "INFO": 1, "WARNING": 2, "ERROR": 3,
                               "CRITICAL": 4})  # fmt: skip


class Stream:
    """`ucmtrans.Stream` of a device whose memory is the host's."""

    def DeviceToHostGatherAsync(self, sources: Any, target: int, size: int, number: int) -> None:
        for place, source in enumerate(sources.tolist()[:number]):
            ctypes.memmove(target + place * size, source, size)

    def HostToDeviceScatterAsync(self, source: int, targets: Any, size: int, number: int) -> None:
        for place, target in enumerate(targets.tolist()[:number]):
            ctypes.memmove(target, source + place * size, size)

    def Synchronized(self) -> None:
        pass


class Device:
    """`ucmtrans.Device`."""

    def Setup(self, device_id: int) -> None:
        pass

    def MakeStream(self) -> Stream:
        return Stream()


for _name in ("ucm.shared.infra.ucmlogger", "ucm.shared.trans.ucmtrans"):
    sys.modules[_name] = _Native(_name)
_logger = _Native("ucm.logger")
_logger.init_logger = logging.getLogger  # type: ignore[attr-defined]
sys.modules["ucm.logger"] = _logger
_patch = _Native("ucm.integration.vllm.patch.logger_patch")
_patch.patch_logger = None  # type: ignore[attr-defined]
sys.modules["ucm.integration.vllm.patch.logger_patch"] = _patch

import torch  # noqa: E402
from ucm.shared import trans  # noqa: E402
from ucm.store.factory_v1 import UcmConnectorFactoryV1  # noqa: E402
from ucm.store.ucmstore_v1 import UcmKVStoreBaseV1  # noqa: E402

trans.ucmtrans = sys.modules["ucm.shared.trans.ucmtrans"]
trans.ucmtrans.Device = Device  # type: ignore[attr-defined]

LAYERS, TENSOR = 6, 16 << 10
"""a shard of one layer has two tensors of these bytes"""


class Engine:
    """The scheduler's store, or that of a worker with its KV cache."""

    def start(
        self, mount: str, namespace: str, *, is_worker: bool = True, layers: int = LAYERS, tensor: int = TENSOR,
        layerwise: bool = True, device: int = -1, extra: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """``layers``, ``tensor``: of the model. ``device``: the number of a device, -1: none."""
        from kvfuse.connectors.ucm.config import connector

        entry: Any = connector(mount, namespace)
        config = entry["ucm_connector_config"] | {
            "share_buffer_enable": False, "unique_id": "engine", "deadline": DEADLINE_S,
        }  # fmt: skip
        self.sizes = [tensor] * 2 * (1 if layerwise else layers)
        if is_worker:
            config |= {
                "device_id": device, "tensor_size_list": self.sizes, "shard_size": sum(self.sizes),
                "block_size": 2 * tensor * layers, "local_rank_size": 1,
            }  # fmt: skip
        else:
            config |= {"block_size": 12345}
        self.layers = layers if layerwise else 1
        self.store = UcmConnectorFactoryV1.create_connector(
            entry["ucm_connector_name"], config | (extra or {}), entry["ucm_connector_module_path"]
        )
        assert isinstance(self.store, UcmKVStoreBaseV1)

    def lookup(self, ids: list[bytes]) -> tuple[list[bool], int]:
        return self.store.lookup(ids), self.store.lookup_on_prefix(ids)

    def dump(self, ids: list[bytes], *, seed: int = 0, tensors: bool = False) -> None:
        """Layer by layer, as UCM does it."""
        tasks = []
        kept = []
        for layer in range(self.layers):
            rows = [self._tensors(one, layer, seed) for one in ids]
            kept.append(rows)
            if tensors:
                tasks.append(self.store.dump(ids, [layer] * len(ids), rows))
            else:
                tasks.append(self.store.dump_data(ids, [layer] * len(ids), self._addresses(rows), layer and 0))
        for task in tasks:
            self.store.wait(task)
            assert self.store.check(task)

    def load(self, ids: list[bytes], *, seed: int = 0, tensors: bool = False) -> str:
        """ "", where all was loaded with the bytes of `dump`; else what UCM is told."""
        for layer in range(self.layers):
            rows = [[torch.zeros(size, dtype=torch.uint8) for size in self.sizes] for _ in ids]
            shards = [layer] * len(ids)
            if tensors:
                task = self.store.load(ids, shards, rows)
            else:
                task = self.store.load_data(ids, shards, self._addresses(rows).tolist())
            try:
                self.store.wait(task)
            except Exception as error:  # as UCM's connector does
                return f"{type(error).__name__}: {error}"
            for one, row in zip(ids, rows, strict=True):
                wanted = self._tensors(one, layer, seed)
                assert all(torch.equal(got, right) for got, right in zip(row, wanted, strict=True))
        return ""

    def prefetch(self, ids: list[bytes]) -> None:
        self.store.prefetch(ids)

    def names(self, block_id: bytes) -> list[bytes]:
        return self.store._keys([block_id], self.layers)

    def is_up(self) -> bool:
        return self.store.store.is_up and self.store.is_checked

    def is_connected(self) -> bool:
        return self.store.store.is_up

    def shards(self) -> int:
        return self.store._known_shards()

    def stored(self) -> int:
        return self.store.store.counters.stored

    def parse(self, path: str) -> dict[str, Any]:
        """What UCM's own configuration makes of a file."""
        sys.modules.pop("ucm.utils", None)
        from ucm.utils import Config

        extra = types.SimpleNamespace(kv_connector_extra_config={"UCM_CONFIG_FILE": path})
        return Config(extra).get_config()

    def close(self) -> None:
        self.store.close()

    def _tensors(self, block_id: bytes, layer: int, seed: int) -> list[torch.Tensor]:
        """The bytes of a block, as its name and a seed say."""
        start = int(hashlib.md5(block_id + bytes([layer])).hexdigest()[:12], 16) + seed
        generator = torch.Generator().manual_seed(start)
        return [torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator) for size in self.sizes]

    def _addresses(self, rows: list[list[torch.Tensor]]) -> np.ndarray[Any, Any]:
        return np.array([[tensor.data_ptr() for tensor in row] for row in rows], np.uint64)


if __name__ == "__main__":
    serve(Engine)
