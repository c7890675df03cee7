"""How UCM is configured to keep its blocks in a mount."""

from __future__ import annotations

import json

from kvfuse.connectors.engine import release, version_of

PACKAGE, ENGINE = "uc-manager", "ucm"
VERSIONS = "0.5 and newer (UcmKVStoreBaseV1 with lookup_on_prefix and load_data)"
TESTED = (0, 5)

TRANSFER = {
    "kv_connector": "UCMConnector", "kv_connector_module_path": "ucm.integration.vllm.ucm_connector",
    "kv_role": "kv_both", "kv_connector_extra_config": {"UCM_CONFIG_FILE": "ucm.yaml"},
}  # fmt: skip
"""vLLM's --kv-transfer-config"""


def connector(mount: str, namespace: str) -> dict[str, object]:
    """The one entry of ``ucm_connectors``."""
    return {
        "ucm_connector_name": "KvfuseStore",
        "ucm_connector_module_path": "kvfuse.connectors.ucm",
        "ucm_connector_config": {"mount": mount, "namespace": namespace},
    }


def configuration(mount: str, namespace: str) -> str:
    """The YAML file, and vLLM's flag that names it."""
    entry = connector(mount, namespace)
    own = entry["ucm_connector_config"]
    return f"""\
# ucm.yaml
ucm_connectors:
  - ucm_connector_name: {json.dumps(entry["ucm_connector_name"])}
    ucm_connector_module_path: {json.dumps(entry["ucm_connector_module_path"])}
    ucm_connector_config: {json.dumps(own)}
use_layerwise: true
enable_event_sync: false

# vllm serve MODEL --kv-transfer-config '{json.dumps(TRANSFER)}'
"""


def check_engine() -> list[str]:
    """Advice about the installed engine."""
    found = version_of(ENGINE)
    if found is None:
        return []
    return (
        [f"{found} has no UcmKVStoreBaseV1 as the adapter needs it ({VERSIONS})"]
        if () < release(found) < TESTED
        else []
    )
