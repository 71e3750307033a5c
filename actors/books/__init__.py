"""Pure rules: no I/O, time is handed in."""
