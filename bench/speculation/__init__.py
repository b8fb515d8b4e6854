"""The figures of docs/speculation.md: speed with and without speculation, and acceptance."""
