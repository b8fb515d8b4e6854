"""Evaluation suites: contexts, the questions asked about them, and how replies are graded."""
