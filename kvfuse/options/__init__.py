"""What a mount can be told: the options, and how they are read from mount.conf and the command line."""
