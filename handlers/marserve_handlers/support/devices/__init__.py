"""The device that a worker computes on.

devices          which device
device_errors    what an accelerator's runtime says when it fails
driver           NVIDIA's driver, without a device
compilation      whether, and how, a model is compiled
engines          what engines of language models need of their worker
"""

__all__: list[str] = []
