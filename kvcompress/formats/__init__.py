"""How keys and values are held in memory, one file a format."""
