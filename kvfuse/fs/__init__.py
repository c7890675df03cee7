"""The FUSE door: ``ops`` translates requests, ``virtual`` serves MNT/.kvfuse, ``mount_session`` runs both on a volume.

``fusewire`` is imported first: it must be loaded before pyfuse3.
"""

from kvfuse.native import fusewire as fusewire
