"""The protocol of a group of replicas, as a state machine without I/O."""
