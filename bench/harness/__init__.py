"""The benchmark harness: `cometmq bench`.

Systems (servers with a durability level) are started by it, workers (clients, in any language) are
processes of their own, and every run ends with a check of what was acknowledged. See
docs/performance.md for the method. What it needs beside CometMQ: `pip install '.[bench]'`.
"""
