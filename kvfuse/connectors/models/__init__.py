"""Weights of models, read through rings. See `WeightReader`, and docs/models.md for which loader takes it how."""

from __future__ import annotations

from kvfuse.connectors.models.weight_reader import WeightReader

__all__ = ["WeightReader"]
