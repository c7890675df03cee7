"""Memory that outlives a daemon: the contract of its keeper, tables of rows, a log, a word of expiry."""
