"""The daemon's side of rings: connections, ring threads, calls in the event loop, limits of users."""
