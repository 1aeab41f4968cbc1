#!/usr/bin/env bash
# The whole job on this machine: bash examples/demo.sh [MODEL] [FLAGS OF "ssdtune demo"]
#
# Sets up .venv, makes a small model unless MODEL names a checkpoint, measures, plans, fine-tunes with all
# states on SSD, exports, and tries the result with transformers. Everything is written to demo/.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/../tools/venv.sh" ""
exec "$python" -m ssdtune demo --demo-dir "$root/demo" "$@"
