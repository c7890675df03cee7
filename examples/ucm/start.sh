#!/usr/bin/env bash
# Starts vLLM with UCM's connector and its blocks in a kvfuse mount.
#   MODEL=meta-llama/Llama-3.1-8B-Instruct MOUNT=/mnt/kv examples/ucm/start.sh [flags of vllm serve]
# NAMESPACE: a folder of the mount, one for each model. CONFIG: the file that is written for UCM. VLLM: the program.
set -euo pipefail
: "${MODEL:?say which model}" "${MOUNT:=/mnt/kv}" "${NAMESPACE:=ucm}" "${CONFIG:=$PWD/ucm.yaml}" "${VLLM:=vllm}"

cat >"$CONFIG" <<YAML
ucm_connectors:
  - ucm_connector_name: "KvfuseStore"
    ucm_connector_module_path: "kvfuse.connectors.ucm"
    ucm_connector_config: {"mount": "$MOUNT", "namespace": "$NAMESPACE"}
use_layerwise: true
enable_event_sync: false
YAML
exec "$VLLM" serve "$MODEL" --kv-transfer-config \
    "{\"kv_connector\": \"UCMConnector\", \"kv_connector_module_path\": \"ucm.integration.vllm.ucm_connector\", \
\"kv_role\": \"kv_both\", \"kv_connector_extra_config\": {\"UCM_CONFIG_FILE\": \"$CONFIG\"}}" "$@"
