"""Replication: how a broker's log comes to other machines, and who of them is the master."""
