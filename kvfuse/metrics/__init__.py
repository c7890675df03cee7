"""The metrics door: what a mounted volume tells a metrics server that asks it."""
