"""The Spark pipeline: sources, sinks and jobs. Not there yet; nothing of it is imported."""
