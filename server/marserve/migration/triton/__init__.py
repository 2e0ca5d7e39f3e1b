"""Imports a model repository of Triton's: archives and settings of what can be served, and findings about all of it.

importing     the whole import of one repository: what is planned, and how it is written
repository    finds models, versions and files, and which versions are served
model         one model: what its configuration asks for, as an archive's configuration and findings
tensors       its inputs and outputs as a signature
serving       its batching, instances and other ways to be served as options of marserve
onnx_graph    the inputs and outputs of an ONNX file, read without its weights
config_text   `config.pbtxt` as a tree that knows lines, and which fields were not read
notes         the findings about one file

Nothing of the repository is run, and protobuf and ONNX Runtime are not needed.
"""
