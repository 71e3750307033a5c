"""Jobs over stores and archives. Each is a function here, and a command `cometmq spark`."""
