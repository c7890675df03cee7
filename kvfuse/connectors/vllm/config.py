"""What an operator needs to know of vLLM: versions, flags and JSON. Needs no vLLM."""

from __future__ import annotations

import json
from importlib.metadata import version

PACKAGE = "vllm"
VERSIONS = "0.25 and newer"
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


def installed() -> tuple[int, int]:
    """Of vLLM; (0, 0): a version that is made otherwise."""
    try:
        major, minor = version(PACKAGE).split(".")[:2]
        return int(major), int(minor)
    except ValueError:
        return 0, 0


def finds_modules() -> bool:
    """This vLLM loads tiers by ``module_path``; otherwise they are registered."""
    return not (0, 25) <= installed() < (0, 28)


def check_engine() -> list[str]:
    """Advice about the vLLM that is installed."""
    if installed() == (0, 0):
        return [f"vLLM {version(PACKAGE)} is no release that this adapter knows; it was tried with 0.33."]
    if installed() < (0, 25):
        return [f"vLLM {version(PACKAGE)} has no secondary tiers as this adapter is one: update to 0.25 or newer."]
    return []
