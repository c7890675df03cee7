"""Adapters of inference engines, over `kvfuse.usrbio.client` alone: one package an engine.

`kvfuse.connectors.ENGINE` is what the engine's configuration names; `kvfuse.connectors.ENGINE.config` needs no engine.
"""
