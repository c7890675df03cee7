"""What a host of a shared volume pays, by the number of hosts: `run` measures, `program` is the hosts."""
