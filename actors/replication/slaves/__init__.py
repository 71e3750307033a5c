"""RocketMQ's plain replication: the master's side, and a slave that copies its log."""
