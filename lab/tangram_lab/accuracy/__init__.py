"""Evaluation suites: contexts, questions about them, and the grading of replies."""
