"""The CSI node plug-in: it gives pods namespaces of the kvfuse mounts that stand on their node.

Read in this order: `csi_command` (the program), `csi_server` (sockets, services, errors), `node_service` (what the
kubelet asks), `volume_words` (what a volume says of itself), `node_volumes` (mounts and namespaces), `safe_paths`
(folders by paths that others name), `csi_messages` (the protocol).

The plug-in mounts no volume. A mount stands at ``VOLUMES/NAME/mnt`` already, and the plug-in binds a folder of it to
the path that the kubelet names. So pods keep their files when the plug-in ends, and while there is none.
"""
