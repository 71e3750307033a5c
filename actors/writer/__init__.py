"""The commitlog process: the single writer of the log."""
