#!/usr/bin/env bash
# Starts SGLang with its cache in a kvfuse mount.
#   MODEL=meta-llama/Llama-3.1-8B-Instruct MOUNT=/mnt/kv examples/sglang/start.sh [flags of sglang.launch_server]
# PYTHON: of the environment with SGLang and kvfuse. NAMESPACE: a folder of the mount, one for each model and layout.
set -euo pipefail
: "${MODEL:?say which model}" "${MOUNT:=/mnt/kv}" "${NAMESPACE:=sglang}" "${PYTHON:=python}"

extra=$(cat <<JSON
{"backend_name": "kvfuse", "module_path": "kvfuse.connectors.sglang", "class_name": "KvfuseHiCache",
 "interface_v1": 1, "allocator": "shm", "hicache_storage_pass_prefix_keys": true,
 "mount": "$MOUNT", "namespace": "$NAMESPACE"}
JSON
)
exec "$PYTHON" -m sglang.launch_server --model-path "$MODEL" \
    --enable-hierarchical-cache \
    --hicache-mem-layout page_first --hicache-io-backend kernel \
    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config "$extra" \
    --enable-metrics "$@"
