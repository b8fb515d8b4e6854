"""Attention, storing and selecting on pages: a reference in torch, compiled for CPUs and GPUs."""
