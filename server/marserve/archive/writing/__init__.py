"""Makes archives, the same bytes each time.

writer           model archives
declaring        what a handler declares, by importing it in a process of its own
traced           whether a trace does what its class does, in a process of its own
sources          from a Python file, a program or a folder to the plan of an archive
staging          planned archives as entries of a model store, for `marserve run`
python_source    what a Python file says, read without running it
workflow_writer  workflow archives
model_archiver   the archiver as Python calls it
model_export     its steps one by one, under TorchServe's names
"""
