"""`python -m quire` is `quire`."""

from quire.cli.main import main

if __name__ == "__main__":
    main()
