"""Requests and answers of the Open Inference Protocol (v2), with its binary tensors, as arrays and back.

`datatypes`   the protocol's names of numpy's types, and the elements of BYTES
`request`     the body of `/v2/models/…/infer` to checked arrays, parameters and the outputs asked for
`answer`      arrays to a body: JSON, raw tensors behind it, classifications
`elements`      all of it for a model of one text, of bytes or of a picture
`shared_memory`  tensors in files that clients share with the server
`unpacking`     a body that came compressed
`marking`     which requests of a batch came by that route
`inferring`   all of it for a model of named tensors

Knows no sockets. numpy and msgspec alone are imported.
"""
