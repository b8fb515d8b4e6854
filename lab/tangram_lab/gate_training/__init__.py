"""Train a gate: a small model that predicts a slow scorer from hidden states (Fast KVzip)."""
