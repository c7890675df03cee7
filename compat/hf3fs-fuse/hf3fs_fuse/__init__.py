"""What engines written for 3FS's rings import, served by a kvfuse mount. See `hf3fs_fuse.io`."""
