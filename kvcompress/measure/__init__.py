"""What is measured: memory, quality, speed, and how sure a difference is."""
