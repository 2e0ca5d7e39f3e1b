"""What an archive says of itself.

manifest           `MAR-INF/MANIFEST.json`
model_config       `model-config.yaml`
runtime_options    what of `model-config.yaml` the runtimes of built-in handlers read
declaration        `MAR-INF/declaration.json`
workflow_manifest  `WAR-INF/MANIFEST.json`
json_depth         how deep a JSON document is nested
built_in_handlers  the handlers that need no file in it
weight_size        how many bytes of weights it holds
torchscript        TorchScript files without what is for debugging
"""
