"""`rings_daemon` in a process that never looks for cyclic garbage: what is not released by itself stays."""

from __future__ import annotations

import gc
import sys

from door_daemon import main
from rings_daemon import door

UNCOLLECTED_DAEMON = (sys.executable, __file__)
"""command of a `KvfuseMount` with this door"""

if __name__ == "__main__":
    gc.disable()
    sys.exit(main([door]))
