"""Makes `python -m quire` the same as the command `quire`."""

from quire.cli.main import main

if __name__ == "__main__":
    main()
