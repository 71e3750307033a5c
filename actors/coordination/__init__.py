"""Topics, groups, offsets, and where brokers are found."""
