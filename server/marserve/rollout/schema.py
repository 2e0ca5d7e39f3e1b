"""`python -m marserve.rollout.schema`, the former name of `marserve.desired_state.schema`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("marserve.desired_state.schema", run_name="__main__")
