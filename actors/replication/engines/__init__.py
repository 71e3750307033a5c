"""Engines that decide the single small record of a group: SQLite and etcd."""
