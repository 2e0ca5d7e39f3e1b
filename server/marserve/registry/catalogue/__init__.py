"""The table of what is registered, and what reads it.

versions             the table of models and versions, and the default
plan                 what a version is made of
traffic              which version answers a request
traffic_control      calls about weights, sticky keys and labels
mirrors              calls about shadows and watched arms
named_answers        puts the name of the version into the answer
describe             the members of the describe answer
activity             what a version does now, in brief
expected_input       what a handler takes, guessed from its name
protocol_tensors     which tensors a call of the Open Inference Protocol may have
metadata_of_handler  what the model's own code adds to it
readiness            whether the server should get requests
snapshot             the models as a document, and back
snapshot_writer      writes a snapshot after each change
"""
