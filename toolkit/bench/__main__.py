"""`python -m toolkit.bench` is `toolkit bench` without the rest of the command line."""

import argparse
import sys

from . import options, suite

if __name__ == "__main__":
    parser = argparse.ArgumentParser("python -m toolkit.bench", description=suite.__doc__, allow_abbrev=False)
    options.add(parser)
    try:
        sys.exit(suite.run(parser.parse_args()))
    except ValueError as error:  # a model or a file that can't be read
        print(f"toolkit: {error}", file=sys.stderr)
        sys.exit(2)
