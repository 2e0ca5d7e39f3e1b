"""Workflows: graphs of models and functions that answer as one (contract 4).

workflows  every registered workflow
engine     runs requests through one graph
dag        the graph, and how far a request is
spec       reads a workflow's spec
intake     from a registration's word to a workflow
functions  which functions the handler file does not have
"""
