"""What every actor stands on: loop, sockets, requests, roles, logs."""
