"""The producer: batches, attempts, answers."""
