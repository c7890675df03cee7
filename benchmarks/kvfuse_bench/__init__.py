"""Traffic and measurements: what ``kvfuse replay`` and ``kvfuse bench`` run.

A package beside kvfuse, which never imports it. It uses a volume as an engine does: as a folder, through POSIX calls,
or as a client through rings. It imports nothing of the rooms that make a volume.
"""
