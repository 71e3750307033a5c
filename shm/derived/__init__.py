"""What can be built anew from the log: ConsumeQueues and index files."""
