"""Makes archives, the same bytes each time.

writer           model archives
declaring        what a handler declares, by importing it in a process of its own
workflow_writer  workflow archives
model_archiver   the archiver as Python calls it
model_export     its steps one by one, under TorchServe's names
"""
