"""The scheduler: delayed messages, timers, retries, transaction checks."""
