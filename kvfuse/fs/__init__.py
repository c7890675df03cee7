"""Door 1: the POSIX mount. ``ops`` translates, ``virtual`` holds MNT/.kvfuse, ``mount`` runs both over a volume.

``fusewire`` comes first: it has to be there before pyfuse3.
"""

from kvfuse.native import fusewire as fusewire
