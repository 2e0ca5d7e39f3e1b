"""What a machine with a GPU and without a package index needs to run tests/gpu and benchmarks/gpu.py."""
