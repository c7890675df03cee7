"""Memory of GPUs as the target and the source of blocks: `Client.iov_from_gpu`. docs/gpu.md says how it is used."""
