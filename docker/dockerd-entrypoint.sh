#!/bin/sh
# Where TorchServe's image has its entry point; manifests name it.
exec /home/venv/bin/python -P -m marserve.cli.container "$@"
