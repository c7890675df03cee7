"""Model loading: safetensors files read into memory by the loaders that engines use, on a volume and beside it."""
