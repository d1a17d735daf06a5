import sys

assert sys.version_info >= (3, 11), "CORY needs Python 3.11 or later"
