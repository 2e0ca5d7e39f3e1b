"""TorchServe's name for tools for PiPPy."""

from marserve_handlers.distributed.pippy import get_pipeline_driver, initialize_rpc_workers, pippy_installed

__all__ = ["get_pipeline_driver", "initialize_rpc_workers", "pippy_installed"]
