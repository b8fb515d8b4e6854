"""One model on several devices: rank 0 tells the others what to compute."""
