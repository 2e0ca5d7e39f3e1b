"""Observers: they follow a model's requests and do not change the answers.

observers    the shadow and the arms of one model, as `Registry.submit` calls them
shadow       copies a share of requests to another version, and compares the answers
shadow_spec  what it copies and how it compares, read from documents
arms         counts how the requests of each version ended
proportions  exact bounds for the rate behind a count
processes    what the processes of workers use, for the metrics page
yielding     gives the workers of a shadow the lowest priority for processors
"""
