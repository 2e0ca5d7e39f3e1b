"""The programs of containers: what they start, and their health check.

container      the first program of a container
first_process  a minimal init
sagemaker      how SageMaker starts a container
healthcheck    the program of an image's `HEALTHCHECK`
"""
