"""Workflows: graphs of models and functions that answer as one (contract 4).

workflows  every registered workflow
engine     runs requests through one graph
dag        the graph, and how far a request is
spec       reads a workflow's spec
intake     from the archive that a registration names to a workflow
functions  functions that the handler file lacks
"""
