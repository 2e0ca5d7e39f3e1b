"""What makes a model faster, and shows that it stays the same. Runs in processes of commands, never in a server.

call_arrays  what a model is called with and gives, as named arrays
capture      keeps what goes into a handler's model, and runs it again
builds       the ways in which a model is built anew
material     what a build is made from
onnx_export  a model of torch as an ONNX file
traps        what exporters bake or refuse, with the author's file and line
tracing      a trace beside its class, at several batch sizes
weights      how many bytes of weights a build holds while it serves
sample_calls calls with what a build gave, in one file
native_package  a model compiled by AOTInductor, in one file with native code
telemetry_off   keeps OpenVINO and NNCF from reporting to their maker
machine      what a build depends on: instructions, versions
batches      the batches in which captured rows are run: alone, in twos, in full batches, beside a loud mate
"""

__all__: list[str] = []
