"""The holder keeps a mount while daemons end and start: its program, the guard, the daemon's side."""
