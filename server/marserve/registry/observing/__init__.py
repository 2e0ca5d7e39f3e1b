"""What follows a model's requests without changing their answers: shadows and counts.

observers  the shadow and the arms of one model, as `Registry.submit` meets them
shadow     copies a share of requests to another version, and compares the answers
arms       what became of the requests that went to each version
yielding   has workers of a shadow leave the processors to others
"""
