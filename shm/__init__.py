"""The store: what lies in memory and on disk."""
