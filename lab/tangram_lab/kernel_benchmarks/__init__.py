"""Times the decode schedules on this GPU, on batches that are made up."""
