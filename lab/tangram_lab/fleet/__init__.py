"""Routing over simulated replicas, on recorded traces."""
