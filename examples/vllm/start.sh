#!/usr/bin/env bash
# Starts vLLM with its cache in a kvfuse mount.
#   MODEL=meta-llama/Llama-3.1-8B-Instruct MOUNT=/mnt/kv examples/vllm/start.sh [flags of vllm serve]
# VLLM: the program, of an environment with kvfuse. NAMESPACE: a folder of the mount, one for each model and layout.
# POOL: bytes of host memory between the GPU and the mount.
set -euo pipefail
: "${MODEL:?say which model}" "${MOUNT:=/mnt/kv}" "${NAMESPACE:=vllm}" "${VLLM:=vllm}" "${POOL:=8589934592}"

transfer=$(cat <<JSON
{"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {
  "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": $POOL, "secondary_tiers": [
    {"type": "KvfuseTier", "module_path": "kvfuse.connectors.vllm", "mount": "$MOUNT", "namespace": "$NAMESPACE"}]}}
JSON
)
exec "$VLLM" serve "$MODEL" --kv-transfer-config "$transfer" "$@"
