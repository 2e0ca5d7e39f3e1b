"""TorchServe's name for `marserve_handlers.trt_llm`."""

from marserve_handlers.trt_llm import TRTLLMHandler

__all__ = ["TRTLLMHandler"]
