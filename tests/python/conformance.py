"""What the client tests share: a server that runs, or one that is started, and tests that are skipped loudly where a package is missing.

  PROGRAM --base-url http://127.0.0.1:8000 [--api-key KEY]
  PROGRAM --server EXECUTABLE     starts EXECUTABLE, which prints its port in its first line, and ends it afterwards
"""

import argparse
import importlib
import subprocess
import sys
import unittest

ROOT = ""          # http://127.0.0.1:8000
API_KEY = "none"
SCRIPTED = False   # the server is tests/server/scripted_server.cpp, which says what its script says

WEATHER = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]}
NOTHING = {"type": "object", "properties": {}}
WEATHER_ARGUMENTS = {"city": "São \"Paulo\"", "days": 3}  # what the script calls it with
THOUGHT, ANSWER = "Let me think: 你好?\n", "Hello 🙂 world, one two three."


def require(*packages):
    """Ends the program with status 77 (CTest: skipped) unless all are there."""
    for package in packages:
        try:
            importlib.import_module(package)
        except ImportError:
            print(f"SKIPPED: the package {package} is not installed (pip install {package.replace('_', '-')})", file=sys.stderr)
            sys.exit(77)


def main(description):
    global ROOT, API_KEY, SCRIPTED
    parser = argparse.ArgumentParser(description=description, epilog=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--base-url")
    target.add_argument("--server")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("tests", nargs="*", help="names of tests; all when empty")
    options = parser.parse_args()
    API_KEY = options.api_key
    SCRIPTED = options.server is not None
    server = None
    if options.server:
        server = subprocess.Popen([options.server], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        ROOT = f"http://127.0.0.1:{int(server.stdout.readline())}"
    else:
        ROOT = options.base_url.rstrip("/").removesuffix("/v1")
    try:
        result = unittest.main(argv=[sys.argv[0]] + options.tests, exit=False, verbosity=2).result
    finally:
        if server is not None:
            server.stdin.close()  # the program ends with its input
            server.wait(30)
    sys.exit(0 if result.wasSuccessful() and result.testsRun > 0 else 1)
