"""`python -m marserve.cli.healthcheck`, as images and compose files call `platforms/healthcheck.py`."""

from marserve.cli.platforms.healthcheck import main

if __name__ == "__main__":
    main()
