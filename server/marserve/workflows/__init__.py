"""Workflows: graphs of models and functions that answer as one (contract 4)."""
