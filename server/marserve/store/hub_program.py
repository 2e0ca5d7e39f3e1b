"""`python -m marserve.store.hub_program`, the former name of `sources/hub_program.py`."""

from marserve.store.sources.hub_program import main

if __name__ == "__main__":
    main()
