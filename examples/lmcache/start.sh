#!/usr/bin/env bash
# Starts LMCache's server with its second tier in a kvfuse mount.
#   MOUNT=/mnt/kv examples/lmcache/start.sh [flags of lmcache server]
# Or an engine with LMCache in its own process:
#   MOUNT=/mnt/kv examples/lmcache/start.sh engine vllm serve MODEL --kv-transfer-config \
#       '{"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}'
# NAMESPACE: a folder of the mount. CONFIG: the file that is written for the engine. LMCACHE: the program.
set -euo pipefail
: "${MOUNT:=/mnt/kv}" "${NAMESPACE:=lmcache}" "${CONFIG:=$PWD/lmcache.yaml}" "${LMCACHE:=lmcache}"

if [ "${1:-}" = engine ]; then
    shift
    cat >"$CONFIG" <<YAML
chunk_size: 256
local_cpu: true
max_local_cpu_size: 5.0
remote_storage_plugins: ["kvfuse"]
extra_config:
  remote_storage_plugin.kvfuse.module_path: "kvfuse.connectors.lmcache"
  remote_storage_plugin.kvfuse.class_name: "KvfuseConnectorAdapter"
  remote_storage_plugin.kvfuse.mount: "$MOUNT"
  remote_storage_plugin.kvfuse.namespace: "$NAMESPACE-engine"
  save_chunk_meta: false
  shm_name: "lmcache_kvfuse"
YAML
    LMCACHE_CONFIG_FILE=$CONFIG PYTHONHASHSEED=${PYTHONHASHSEED:-0} exec "$@"
fi
read -ra program <<<"$LMCACHE"
exec "${program[@]}" server --l1-size-gb 20 --eviction-policy LRU --no-l1-use-lazy --shm-name kvfuse \
    --l2-adapter "{\"type\": \"plugin\", \"module_path\": \"kvfuse.connectors.lmcache\", \"class_name\": \"KvfuseL2Adapter\", \
\"adapter_params\": {\"mount\": \"$MOUNT\", \"namespace\": \"$NAMESPACE\"}}" "$@"
