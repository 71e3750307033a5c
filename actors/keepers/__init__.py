"""Who works ahead of the writer and behind it: space, disk, queues, index, cleaning."""
