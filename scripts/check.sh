#!/bin/sh
# Checks format, lint and types. With --fix it formats, and mends what the linter can mend, instead.
set -eu
cd "$(dirname "$0")/.."

cpp_sources=$(find csrc -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')

if [ "${1:-}" = --fix ]; then
  ruff check --quiet --fix .
  ruff format --quiet .
  clang-format -i $cpp_sources
  exit
fi

ruff format --check .
ruff check --quiet .
mypy
clang-format --dry-run -Werror $cpp_sources
