"""The options of a mount, and how they are read from mount.conf and the command line."""
