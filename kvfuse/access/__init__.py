"""What a caller may do that comes through no kernel: its user, its tokens, the folders above; shared by such doors."""
