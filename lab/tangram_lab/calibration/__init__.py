"""The quality of calibrations: agreement, losses of fixed budgets, and enough samples."""
