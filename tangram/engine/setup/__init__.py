"""From a config to an engine that runs: profiles, memory, kernels, drafters."""
