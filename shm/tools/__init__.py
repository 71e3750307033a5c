"""To examine and mend a store."""
