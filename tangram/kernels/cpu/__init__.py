"""The backend of a CPU: compiled loops, or torch's own operators."""
