"""The archiver's name for the parser of its flags."""

import argparse

from marserve.cli.torchserve.torch_model_archiver import build_parser


class ArgParser:
    """Makes the parser."""

    @staticmethod
    def export_model_args_parser() -> argparse.ArgumentParser:
        """The flags of `torch-model-archiver`; paths are text."""
        return build_parser(str)


__all__ = ["ArgParser"]
