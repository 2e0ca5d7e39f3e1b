"""`python -m marserve.cli.container`, as images and compose files call `platforms/container.py`."""

from marserve.cli.platforms.container import main

if __name__ == "__main__":
    main()
