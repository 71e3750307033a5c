"""Connections between the replicas of a group: TLS, certificates, acceptor, receiver, sender."""
