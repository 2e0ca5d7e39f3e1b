"""Makes archives, the same bytes each time.

writer           model archives
workflow_writer  workflow archives
model_archiver   the archiver as Python calls it
model_export     its steps one by one, under TorchServe's names
"""
