"""The same calls over gRPC. Imported only where its libraries are installed.

listener        the two ports, their keys and services
calls           what every call passes: key, wishes, status, log line
answers         the receiver of one call's answer
errors          which status an error has
schema          messages and services as tables, and the classes made of them
inference       TorchServe's inference service
management      TorchServe's management service
open_inference  the Open Inference Protocol
open_inference_control  its calls that change the server, and show settings
dialogues/      its calls of many requests and answers
data_types      how its data types travel
raw_tensors     its tensors as the binary body that workers read
health          the health service
reflection      the reflection service
transport       gRPC on the wire, over h2
"""
