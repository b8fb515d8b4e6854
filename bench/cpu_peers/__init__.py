"""CPU engines side by side on the embedded model: `python -m bench.cpu_peers`."""
