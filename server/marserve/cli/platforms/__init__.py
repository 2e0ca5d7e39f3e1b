"""What containers and platforms start and ask.

container      the first program of a container
first_process  a minimal init
sagemaker      how SageMaker starts a container
healthcheck    what an image's `HEALTHCHECK` runs
"""
