"""OpenMessaging Benchmark workload files, and what runs them: `cometmq bench omb FILE.yaml`."""
