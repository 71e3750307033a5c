"""Administration: topics, groups, single messages, and what is kept."""
