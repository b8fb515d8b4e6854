"""How far calibrations agree, what fixed counts lose, and how many samples are enough."""
