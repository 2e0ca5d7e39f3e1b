"""What stands behind names of TorchServe's package `ts`, which `ts_compat/` offers.

beside_torchserve    keeps TorchServe's own package and ours from being installed over each other
capabilities         what is installed for handlers to use
deprecation          marks functions that will go away
hub                  downloads a model from the Hugging Face hub
internals            names of TorchServe's own server
launcher             starts and stops a server from Python; llm_launcher: one for a language model
metrics_store        the older forms of metrics; model_service: the older base classes
version yaml_config  the version that is offered; a YAML file as plain data
"""

__all__: list[str] = []
