"""What measures the engine or compares it with others. Nothing that serves imports this package."""
