"""What an operator needs to know of vLLM: versions, flags and JSON. Needs no vLLM."""

from __future__ import annotations

import json
import sys

from kvfuse.connectors.engine import release, version_of

PACKAGE = ENGINE = "vllm"
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


def finds_modules() -> bool:
    """This vLLM loads tiers by ``module_path``, as all do of which nothing is known; otherwise they are registered."""
    return not (0, 25) <= release(version_of(ENGINE)) < (0, 28)


def check_engine() -> list[str]:
    """Advice about the vLLM that is installed."""
    found = version_of(ENGINE)
    if found is None:
        return [f"there is no vLLM for {sys.executable}."]
    if not release(found):
        return [f"vLLM {found} is no release that this adapter knows; it is taken for one of 0.28 or newer."]
    if release(found) < (0, 25):
        return [f"vLLM {found} has no secondary tiers as this adapter is one: update to 0.25 or newer."]
    return []
