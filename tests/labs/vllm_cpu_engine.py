"""One run of vLLM on a CPU, with a small model of random weights: what it generates, and how much it computed.

vllm_cpu_engine.py FOLDER MOUNT NAMESPACE: writes the model's configuration to FOLDER, prints "READY", and answers each
number on its standard input, of a prompt, with a line: ROW {"cached": prompt tokens that were not computed, "ids":
tokens that were generated, "first": seconds to the first of them}. Before each prompt vLLM's own caches are emptied, so
that what is cached comes from the mount. It ends with its input. The weights are vLLM's dummy ones, the same in each
run.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONHASHSEED": "0",
}
MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", "vocab_size": 2048,
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
PROMPT_TOKENS, NEW_TOKENS = 1920, 16
POOL_SIZE = 64 << 20


def transfer_config(mount: str, namespace: str) -> dict[str, object]:
    from kvfuse.connectors.vllm.config import transfer_config

    config = transfer_config(mount, namespace)
    extra = config["kv_connector_extra_config"]
    extra |= {"spec_name": "CpuTieringSpec", "spec_module_path": "vllm_cpu_spec", "cpu_bytes_to_use": POOL_SIZE}
    return config


def main(folder: str, mount: str, namespace: str) -> None:
    from vllm import LLM, SamplingParams

    Path(folder, "config.json").write_text(json.dumps(MODEL))
    llm = LLM(
        model=folder, load_format="dummy", skip_tokenizer_init=True, enforce_eager=True, dtype="bfloat16",
        max_model_len=MODEL["max_position_embeddings"], distributed_executor_backend="uni", seed=0,
        disable_log_stats=False,
        **({"kv_transfer_config": transfer_config(mount, namespace)} if mount else {}),
    )  # fmt: skip
    terms = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, detokenize=False, ignore_eos=True)
    llm.generate([{"prompt_token_ids": [7] * 64}], terms, use_tqdm=False)  # the first one compiles, and allocates
    print("READY", flush=True)
    for line in sys.stdin:
        tokens = random.Random(int(line)).choices(range(10, MODEL["vocab_size"]), k=PROMPT_TOKENS)
        assert llm.reset_prefix_cache(reset_connector=True)
        (request,) = llm.generate([{"prompt_token_ids": tokens}], terms, use_tqdm=False)
        row = {
            "cached": request.num_cached_tokens, "ids": list(request.outputs[0].token_ids),
            "first": request.metrics.first_token_latency,
        }  # fmt: skip
        print("ROW " + json.dumps(row), flush=True)
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
