"""Budgets that ship."""
