"""Sizes of the KV blocks that real models make."""

from __future__ import annotations

from typing import NamedTuple


class ModelShape(NamedTuple):
    """The values that a model keeps of one token, two bytes each."""

    layers: int
    values_per_layer: int

    def block_size(self, tokens: int) -> int:
        """Bytes of a block of ``tokens`` tokens, all layers together."""
        return 2 * self.layers * self.values_per_layer * tokens


def _grouped_query(layers: int, kv_heads: int, head_size: int) -> ModelShape:
    """Attention that keeps a key and a value for each KV head."""
    return ModelShape(layers, 2 * kv_heads * head_size)


def _latent(layers: int, latent_size: int, rope_size: int) -> ModelShape:
    """Attention that keeps one compressed latent and one rotary key."""
    return ModelShape(layers, latent_size + rope_size)


MODELS = {
    "llama-3-8b": _grouped_query(layers=32, kv_heads=8, head_size=128),
    "llama-3-70b": _grouped_query(layers=80, kv_heads=8, head_size=128),
    "qwen2.5-0.5b": _grouped_query(layers=24, kv_heads=2, head_size=64),
    "qwen2.5-7b": _grouped_query(layers=28, kv_heads=4, head_size=128),
    "qwen3-32b": _grouped_query(layers=64, kv_heads=8, head_size=128),
    "deepseek-v3": _latent(layers=61, latent_size=512, rope_size=64),
}
