"""TorchServe's command lines, and moving from it.

torchserve               `torchserve`; also `python -m marserve.cli.torchserve`
torch_model_archiver     `torch-model-archiver`
torch_workflow_archiver  `torch-workflow-archiver`
migrate                  `marserve migrate`
migrate_triton           `marserve migrate triton`
finding_lines            what both found, as a person reads it
"""


def main() -> None:
    """Run `torchserve`: the former name of `torchserve.torchserve.main`."""
    # Late: the other modules of this package load without it.
    from marserve.cli.torchserve.torchserve import main as run

    run()
