"""What engines do to storage, measured: ``kvfuse bench engines``.

A *pattern* is how one engine's backend stores and loads blocks, written down as a few lines of calls. `measuring` times
it, `files`, `slots` and `queues` have the patterns, `blocks` the calls of rings, `compare` what stands beside what.
"""
