"""The HTTP door: files and blocks of a volume for programs that have neither the mount nor rings."""
