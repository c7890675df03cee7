"""The operator: makes volumes, namespaces and claims of what their objects in the cluster say, and keeps them so.

`volume_plan` reads a KvfuseVolume, `volume_objects` makes objects of it, `volume_state` says what pods and daemons say,
`lost_nodes` which nodes are not waited for.
`volume_handlers`, `namespace_handlers`, `claim_handlers` and `node_drain` act; they reach the cluster by `cluster_api`.
"""
