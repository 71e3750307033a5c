"""The CommitLog: segments, recovery, who refers to them, what has left."""
