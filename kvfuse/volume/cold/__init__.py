"""The cold tier: blocks that left the volume go to a bucket, and come back when somebody asks for them."""
