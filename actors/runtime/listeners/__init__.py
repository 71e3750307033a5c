"""Listeners: how requests reach an actor, and how answers go back. An actor knows none of this."""
