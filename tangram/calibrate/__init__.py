"""Make profiles: calibration texts, the scores of their chunks, and the entries each head needs."""
