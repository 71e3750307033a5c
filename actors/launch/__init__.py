"""Who starts the processes, watches them, and ends them in order."""
