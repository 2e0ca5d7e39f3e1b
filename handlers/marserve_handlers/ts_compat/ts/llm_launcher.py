"""TorchServe's name for `marserve_handlers.support.torchserve.llm_launcher`."""

from marserve_handlers.support.torchserve.llm_launcher import (
    create_mar_file,
    create_tensorrt_llm_engine,
    get_model_config,
    main,
)

__all__ = ["create_mar_file", "create_tensorrt_llm_engine", "get_model_config", "main"]

if __name__ == "__main__":
    main()
