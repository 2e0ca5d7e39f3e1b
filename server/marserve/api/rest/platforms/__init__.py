"""Routes for platforms and tools.

health            `/ping` and the probes
metrics           the Prometheus page
kserve            KServe's V1 beside inference
open_inference    Open Inference beside inference, as TorchServe answers it
open_inference_models  the same in full, as `marserve` does
open_inference_control  its routes that change the server, and show settings
sagemaker         SageMaker's `/ping` and `/execution-parameters`
shared_memory     its regions of shared memory
plugin_endpoints  endpoints of installed packages
"""
