"""State tables with pure rules: no I/O, time is passed in."""
