"""How LMCache is configured to keep its chunks in a mount."""

from __future__ import annotations

import json
import os

from kvfuse.connectors.engine import release, version_of

PACKAGE = ENGINE = "lmcache"
VERSIONS = "0.5.4 and newer (older ones with L2 adapters of type 'plugin' may do)"
TESTED = (0, 5, 4)

MODULE = "kvfuse.connectors.lmcache"
PLUGIN = "remote_storage_plugin.kvfuse"


def l2_adapter(mount: str, namespace: str) -> dict[str, object]:
    """What --l2-adapter of LMCache's server has."""
    return {
        "type": "plugin", "module_path": MODULE, "class_name": "KvfuseL2Adapter",
        "adapter_params": {"mount": mount, "namespace": namespace},
    }  # fmt: skip


def server_flags(mount: str, namespace: str) -> list[str]:
    """The arguments of ``lmcache server`` beside the size of its L1, which is shared memory for the daemon to map."""
    return ["--no-l1-use-lazy", "--shm-name", "kvfuse", "--l2-adapter", json.dumps(l2_adapter(mount, namespace))]


def engine_config(mount: str, namespace: str) -> dict[str, object]:
    """The YAML of LMCache in the engine's own process."""
    return {
        "chunk_size": 256,
        "local_cpu": True,
        "max_local_cpu_size": 5.0,
        "remote_storage_plugins": ["kvfuse"],
        "extra_config": {
            f"{PLUGIN}.module_path": MODULE,
            f"{PLUGIN}.class_name": "KvfuseConnectorAdapter",
            f"{PLUGIN}.mount": mount,
            f"{PLUGIN}.namespace": namespace,
            "save_chunk_meta": False,
            "shm_name": "lmcache_kvfuse",
        },
    }


def configuration(mount: str, namespace: str) -> str:
    """The flags and JSON of the server, and the YAML for LMCache in the engine's process."""
    *flags, adapter = server_flags(mount, namespace)
    lines = []
    for name, value in engine_config(mount, f"{namespace}-engine").items():
        if isinstance(value, dict):
            lines += [f"{name}:", *(f"  {key}: {json.dumps(inner)}" for key, inner in value.items())]
        else:
            lines.append(f"{name}: {json.dumps(value)}")
    yaml = "\n".join(lines)
    return f"""\
# As a server of its own (MP mode)
lmcache server --l1-size-gb 20 --eviction-policy LRU \\
  {" ".join(flags[:-1])} \\
  --l2-adapter '{adapter}'

# Or in the engine's process: lmcache.yaml, LMCACHE_CONFIG_FILE=lmcache.yaml. shm_name: another one for each rank
{yaml}
"""


def check_engine() -> list[str]:
    """Advice about the installed engine."""
    found = version_of(ENGINE)
    if found is None:
        return []
    advice = []
    if () < release(found) < TESTED:
        advice.append(f"{found} is older than what the adapter is tested with ({VERSIONS})")
    if "PYTHONHASHSEED" not in os.environ:
        advice.append("Set PYTHONHASHSEED to the same number for all engines if chunks are hashed with 'builtin'")
    return advice
