"""kvfuse in Kubernetes. `csi` is the node plug-in."""
