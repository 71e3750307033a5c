"""The native kernel, and the layouts that it shares with Python."""
