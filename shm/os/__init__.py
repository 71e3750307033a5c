"""What the system gives: files, memory, permissions."""
