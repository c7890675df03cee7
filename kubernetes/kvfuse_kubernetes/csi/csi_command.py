"""kvfuse-csi: the node plug-in as a program."""

from __future__ import annotations

import logging
import signal
import socket
import sys
from pathlib import Path
from types import FrameType

import click

from kvfuse import __version__
from kvfuse_kubernetes.csi.csi_server import serving
from kvfuse_kubernetes.csi.node_service import CALL_SECONDS, DRIVER, NodeService
from kvfuse_kubernetes.csi.node_volumes import NodeVolumes

_folder = click.Path(path_type=Path, file_okay=False)


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(0)


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="kvfuse-csi", message="%(prog)s %(version)s")
@click.option("--node", envvar="NODE_NAME", help="Name of the node.  [default: NODE_NAME, or the machine's]")
@click.option(
    "--volumes",
    type=_folder,
    default="/var/lib/kvfuse/volumes",
    show_default=True,
    help="Folder with the node's volumes, mounted at NAME/mnt.",
)
@click.option("--kubelet", type=_folder, default="/var/lib/kubelet", show_default=True, help="The kubelet's folder.")
@click.option(
    "--left",
    type=_folder,
    default="/var/lib/kvfuse/csi",
    show_default=True,
    help="Folder that notes which namespaces of ended pods are still to be removed.",
)
@click.option(
    "--deadline",
    type=click.FloatRange(min=0.1),
    default=CALL_SECONDS,
    show_default=True,
    metavar="SECONDS",
    help="A call whose mount does not answer by then fails, and the kubelet tries again.",
)
def main(node: str | None, volumes: Path, kubelet: Path, left: Path, deadline: float) -> None:
    """Serve pods' kvfuse volumes on this node, until SIGTERM.

    Each volume is mounted already: this program binds namespaces of the mounts to the paths that the kubelet names.
    Pods keep their files while it is absent. docs/kubernetes.md says how it is deployed.
    """
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end)
    if not kubelet.is_dir():
        raise click.ClickException(
            f"{kubelet} is absent: name the kubelet's folder (--kubelet, and the pod's hostPath)"
        )
    endpoint = kubelet / "plugins" / DRIVER / "csi.sock"
    registration = kubelet / "plugins_registry" / f"{DRIVER}-reg.sock"
    name = node or socket.gethostname()
    service = NodeService(NodeVolumes(volumes, kubelet), name, endpoint, left, deadline)
    service.sweep()
    with serving(service, [endpoint, registration]):
        logging.info("%s %s serves %s on node %s", DRIVER, __version__, volumes, service.node)
        service.refused.wait()
    raise click.ClickException("the kubelet refuses this plug-in; its reason is above")


if __name__ == "__main__":
    main()
