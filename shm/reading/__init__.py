"""Messages out of a store, running or not."""
