"""What an operator needs to know of vLLM: versions, flags and JSON. Needs no vLLM."""

from __future__ import annotations

import json
from importlib.metadata import version

PACKAGE = "vllm"
VERSIONS = "0.28 and newer (0.25 to 0.27: register the tier in code)"
MODULE = "kvfuse.connectors.vllm"
TIER = "KvfuseTier"


def transfer_config(mount: str, namespace: str) -> dict[str, object]:
    """vLLM's KVTransferConfig, as it stands in JSON."""
    tier = {"type": TIER, "module_path": MODULE, "mount": mount, "namespace": namespace}
    extra = {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 8 << 30, "secondary_tiers": [tier]}
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


def configuration(mount: str, namespace: str) -> str:
    """Flags of ``vllm serve``."""
    return f"--kv-transfer-config '{json.dumps(transfer_config(mount, namespace), indent=2)}'\n"


def check_engine() -> list[str]:
    """Advice about the vLLM that is installed."""
    found = version(PACKAGE)
    try:
        major, minor = (int(part) for part in found.split(".")[:2])
    except ValueError:
        return [f"vLLM {found} is none that this adapter knows: it was tried with 0.33."]
    if (major, minor) < (0, 25):
        return [f"vLLM {found} has no secondary tiers that look-ups may wait for: update to 0.28 or newer."]
    if (major, minor) < (0, 28):
        return [
            f"vLLM {found} does not load tiers by module_path: call SecondaryTierFactory.register_tier("
            f"'{TIER}', '{MODULE}', '{TIER}') in a plug-in of yours, or update to 0.28 or newer."
        ]
    return []
