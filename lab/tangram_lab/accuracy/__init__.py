"""Evaluation suites: contexts with questions, and the grading of replies."""
