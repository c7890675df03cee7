"""Serves rings in the daemon: connections, ring threads, calls in the event loop, limits of users."""
