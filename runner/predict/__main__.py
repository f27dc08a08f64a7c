import sys

from runner.predict.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
