"""What the Open Inference Protocol (v2) says of a server and its models, over REST and gRPC alike.

`mark`        how a request of the protocol is marked for its worker
`data_types`  the table of data types
`documents`   metadata, configuration, repository and statistics as the protocol's JSON
`request_parameters`  priority, time limit and sequence of an inference request
`server_settings`     settings of traces and of the log
`repository`          loads, unloads and lists models
`regions`             the regions of shared memory that clients have registered
`shared_tensors`      which tensors of a request lie in them
`packed_bodies`       compressed requests
`shown`               clients' values in sentences

Knows neither HTTP nor gRPC. Tensors are read and written in the worker
(`marserve_handlers/declared/open_inference`).
"""
