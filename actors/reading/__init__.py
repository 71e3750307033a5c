"""The reader processes."""
