#!/usr/bin/env bash
# Run the tests: bash tests/run.sh [PYTEST OPTIONS]. Sets up .venv first if that is needed.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/../tools/venv.sh" dev
cd "$root"
# worksteal: a file's tests stay together, so that what they share is made once, and both jobs end together.
exec "$python" -m pytest -n "${SSDTUNE_TEST_JOBS:-2}" --dist worksteal "$@"
