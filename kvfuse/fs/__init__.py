"""Door 1: the POSIX mount. ``ops`` translates, ``virtual`` holds MNT/.kvfuse, ``mount`` runs both over a volume."""
