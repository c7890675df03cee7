"""From memory to the record store: what is pending, how a commit is planned, sent and settled."""
