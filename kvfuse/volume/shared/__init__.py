"""What a volume of many hosts has beside that of one: membership, slab leases, names as transactions, coherence."""
