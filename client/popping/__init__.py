"""Consuming without queues (RocketMQ: POP): messages are popped and acknowledged one by one."""
