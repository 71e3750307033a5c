"""Small files that outlive a run: configuration, identity, holds, stages."""
