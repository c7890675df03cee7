"""The commands ``kvfuse bench`` and ``kvfuse replay``; `kvfuse.cli` finds them by entry points."""
