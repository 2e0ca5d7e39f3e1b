"""What is registered, and what it says of itself.

versions             the table of models and versions, and the default
plan                 what a version is made of
traffic              which version answers a request
traffic_control      weights, sticky keys and labels, asked and ordered
mirrors              shadows and watched arms, asked and ordered
named_answers        tells a client which version answered
describe             the members of the describe answer
metadata_of_handler  what the model's own code adds to it
readiness            whether the server should be sent requests
snapshot             the models as a document, and back
snapshot_writer      when a snapshot is written
"""
