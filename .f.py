import sys

sys.path.insert(0, ".")
from tests.fuzz.stores import main

main(int(sys.argv[1]))
