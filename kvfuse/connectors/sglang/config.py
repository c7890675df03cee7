"""How SGLang is started with its cache in a mount."""

from __future__ import annotations

import json

from kvfuse.connectors.engine import release, version_of

PACKAGE = ENGINE = "sglang"
VERSIONS = "0.5.10 and newer, tested with 0.5.23"
OLDEST = (0, 5, 10)
"""that has batch_exists_v2"""


def extra_config(mount: str, namespace: str) -> dict[str, str | int | bool]:
    """What --hicache-storage-backend-extra-config has."""
    return {
        "backend_name": "kvfuse", "module_path": "kvfuse.connectors.sglang", "class_name": "KvfuseHiCache",
        "interface_v1": 1, "allocator": "shm", "hicache_storage_pass_prefix_keys": True,
        "mount": mount, "namespace": namespace,
    }  # fmt: skip


def flags(mount: str, namespace: str) -> list[str]:
    """The arguments of ``sglang.launch_server`` beside the model's."""
    return [
        "--enable-hierarchical-cache",
        "--hicache-mem-layout", "page_first",
        "--hicache-io-backend", "kernel",
        "--hicache-storage-backend", "dynamic",
        "--hicache-storage-backend-extra-config", json.dumps(extra_config(mount, namespace)),
    ]  # fmt: skip


def configuration(mount: str, namespace: str) -> str:
    """The flags and JSON for the engine."""
    words = flags(mount, namespace)
    words[-1] = f"'{words[-1]}'"
    starts = [number for number, word in enumerate(words) if word.startswith("--")]
    lines = (" ".join(words[start:end]) for start, end in zip(starts, [*starts[1:], len(words)], strict=True))
    return "python -m sglang.launch_server --model-path MODEL \\\n  " + " \\\n  ".join(lines) + "\n"


def check_engine() -> list[str]:
    """Advice about the installed engine."""
    found = version_of(ENGINE)
    if found is None:
        return []
    return [f"{found} is too old for the adapter, which is for {VERSIONS}"] if () < release(found) < OLDEST else []
