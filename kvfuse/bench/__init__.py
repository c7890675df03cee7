"""Traffic and measurements: what ``kvfuse replay`` and ``kvfuse bench`` run.

A room beside ``cli``, imported by it alone. It knows a volume as any engine does - as a folder, through
POSIX calls, or as a client through rings - and imports nothing of the rooms that make one.
"""
