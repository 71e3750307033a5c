"""Actors that maintain the store: allocator, flush, dispatcher (queues, index), cleaner."""
