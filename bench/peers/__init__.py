"""Other brokers to be measured beside CometMQ: a module each, loaded when its name is asked for.

A module has a function `system()` that makes its `cometmq.bench.systems.System`.
"""
