"""What a server shows of itself: metrics, logs and traces."""
