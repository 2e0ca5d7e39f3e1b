"""A model's own Python packages: installed once for all models with the same requirements.

requirements  reads an archive's requirements file line by line, and writes it anew for pip
environments  the folders of installed packages: shared, kept, pruned
pip_place     finds pip
interpreters  which other interpreter a model names, if the operator allows it
interpreter_probe  runs an interpreter once, to see whether workers can run under it
"""
