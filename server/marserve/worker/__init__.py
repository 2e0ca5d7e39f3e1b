"""What runs in a worker process and in a template. Light on purpose: see `tests/test_house.py`."""
