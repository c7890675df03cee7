"""``python -m kvfuse.cli`` is ``kvfuse``."""

from kvfuse.cli import main

main()
