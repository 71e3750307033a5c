"""What the processes of a running broker share: counters and the queue table."""
