"""`python -m oncurve`: the same as the command, for launchers that start a module."""

from oncurve.cli.app import main

if __name__ == "__main__":
    main()
