"""A client's sockets: channels, requests that wait, lines. The only part of protocol with I/O."""
