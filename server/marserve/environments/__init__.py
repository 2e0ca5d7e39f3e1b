"""What a model requires of Python packages: installed once for all models that ask for the same.

requirements  reads an archive's requirements file line by line, and writes it anew for pip
environments  the folders of installed packages: shared, kept, pruned
pip_place     where pip is
"""
