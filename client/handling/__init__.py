"""Handlers: functions of the user that messages go to, and what becomes of each message."""
