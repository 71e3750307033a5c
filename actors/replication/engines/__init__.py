"""The engines that decide the one small record of a group: SQLite and etcd."""
