"""TorchServe's name for `marserve_handlers.vllm`."""

from marserve_handlers.vllm import VLLMHandler

__all__ = ["VLLMHandler"]
