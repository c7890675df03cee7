"""vLLM on a CPU loads a model from a folder. Runs in the engine's own Python.

vllm_loading_engine.py make FOLDER HIDDEN LAYERS: writes a checkpoint of random weights, two layers in each shard.
vllm_loading_engine.py load FOLDER OPTIONS: loads it, with vLLM's options as JSON. It prints LOADING when it begins to
read weights, and then ROW {"ids": tokens that it generates for a certain prompt, "seconds": of reading weights, "size":
bytes of the weights}.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
VOCABULARY = 2048
PROMPT = range(20, 84)
NEW_TOKENS = 16


def make(folder: str, hidden: str, layers: str) -> None:
    import torch
    from safetensors.torch import save_file

    size, inner = int(hidden), int(hidden) * 11 // 4
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
        "vocab_size": VOCABULARY, "hidden_size": size, "intermediate_size": inner, "num_hidden_layers": int(layers),
        "num_attention_heads": size // 64, "num_key_value_heads": size // 128, "max_position_embeddings": 512,
        "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
    }  # fmt: skip
    torch.manual_seed(1)

    def random(*shape: int) -> Any:
        return (torch.randn(*shape) * size**-0.5).to(torch.bfloat16)

    def layer(number: int) -> dict[str, Any]:
        shapes = {
            "self_attn.q_proj": (size, size), "self_attn.k_proj": (size // 2, size),
            "self_attn.v_proj": (size // 2, size), "self_attn.o_proj": (size, size),
            "mlp.gate_proj": (inner, size), "mlp.up_proj": (inner, size), "mlp.down_proj": (size, inner),
        }  # fmt: skip
        tensors = {name: random(*shape) for name, shape in shapes.items()}
        tensors |= {
            name: torch.ones(size, dtype=torch.bfloat16) for name in ("input_layernorm", "post_attention_layernorm")
        }
        return {f"model.layers.{number}.{name}.weight": tensor for name, tensor in tensors.items()}

    def shards() -> Iterator[dict[str, Any]]:
        ends = {name: random(VOCABULARY, size) for name in ("model.embed_tokens.weight", "lm_head.weight")}
        yield ends | {"model.norm.weight": torch.ones(size, dtype=torch.bfloat16)}
        for number in range(0, int(layers), 2):
            yield {
                name: one for each in range(number, min(number + 2, int(layers))) for name, one in layer(each).items()
            }

    names = dict[str, str]()
    for number, tensors in enumerate(shards()):
        file = f"model-{number:05}.safetensors"
        save_file(tensors, Path(folder, file), {"format": "pt"})
        names |= dict.fromkeys(tensors, file)
    Path(folder, "config.json").write_text(json.dumps(config))
    Path(folder, "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))


def load(folder: str, options: str) -> None:
    from vllm import LLM, SamplingParams
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    seconds = list[float]()
    for kind in BaseModelLoader.__subclasses__():  # vLLM says how long it took in its log alone, rounded
        kind.load_weights = timed(kind.load_weights, seconds)  # type: ignore[method-assign]
    llm = LLM(
        model=folder, skip_tokenizer_init=True, enforce_eager=True, dtype="bfloat16", max_model_len=256,
        distributed_executor_backend="uni", seed=0, **json.loads(options),
    )  # fmt: skip
    terms = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, detokenize=False, ignore_eos=True)
    (request,) = llm.generate([{"prompt_token_ids": list(PROMPT)}], terms, use_tqdm=False)
    (spent,) = seconds
    size = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
    print("ROW " + json.dumps({"ids": list(request.outputs[0].token_ids), "seconds": spent, "size": size}), flush=True)
    llm.llm_engine.engine_core.shutdown()


def timed(load_weights: Any, seconds: list[float]) -> Any:
    def timed(*arguments: Any) -> Any:
        print("LOADING", flush=True)
        began = time.perf_counter()
        loaded = load_weights(*arguments)
        seconds.append(time.perf_counter() - began)
        return loaded

    return timed


if __name__ == "__main__":
    {"make": make, "load": load}[sys.argv[1]](*sys.argv[2:])
