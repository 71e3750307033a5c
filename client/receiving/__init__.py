"""The consumer: membership in a group, what is pulled or mapped, and what goes out."""
