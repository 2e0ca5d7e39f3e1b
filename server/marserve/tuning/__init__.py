"""Measures a served model with its users' requests, and finds the options that suit it best.

payloads     the bodies that are sent
load         sends them, as fast as they are answered or when they are due, and notes each answer
http_line    how a request is sent over HTTP/1.1
grpc_line    how a request is sent over gRPC
percentiles  times of requests with what they show, by order statistics; pure
baseline     whether one build is slower than another beyond chance, from pairs in turns; pure
bench        the whole of a measurement: warm-up, load, turns with a baseline
settings     what is tuned, and for which goal; pure
costs        what its batches cost, by size and length; pure
simulated    a version whose batches cost what a function says, under the real dispatcher; pure
search       learns costs, simulates all settings, measures the best few; pure
patch        a model-config.yaml with other values; pure
page         the report of a search as HTML; pure
"""
