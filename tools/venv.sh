# Source this to have ssdtune installed in a virtual environment: . tools/venv.sh EXTRA
# (EXTRA may be "", but must be there: without it bash passes the arguments of the script that sources this)
#
# Sets $root (this project) and $python (the environment's). The environment is .venv, or $SSDTUNE_VENV.
# The package is installed in place, once, and again only when its build or its dependencies change.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${SSDTUNE_VENV:-$root/.venv}
python=$venv/bin/python

_fail() {
  echo "error: $1" >&2
  exit 2
}

_find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  _fail "Python 3.11 or newer was not found. Install it, or name it: PYTHON=/path/to/python3"
}

_state() {
  echo "$root $1"
  (cd "$root" && find native setup.py pyproject.toml constraints.txt tests/io/kvikio_requirements.txt -type f -print0 2>/dev/null |
    sort -z | xargs -0 sha256sum)
}

_install() {
  local extra=$1 base
  base=$(_find_python) || exit $?
  if ! "$python" -c '' 2>/dev/null; then
    echo "making a virtual environment in $venv" >&2
    "$base" -m venv --clear "$venv" >&2 ||
      _fail "cannot make a virtual environment; on Debian and Ubuntu: apt install python3-venv"
  fi
  rm -f "$venv/.ssdtune-$extra"
  echo "installing ssdtune and what it needs (some minutes the first time)" >&2
  (cd "$root" && "$python" -m pip install --quiet --disable-pip-version-check \
    -c constraints.txt -e ".${extra:+[$extra]}") >&2 ||
    _fail "the installation failed; the lines above say why"
  if [ "$extra" = dev ]; then
    "$python" -m pip install --quiet --disable-pip-version-check --no-deps \
      -r "$root/tests/io/kvikio_requirements.txt" >&2 ||
      echo "note: kvikio cannot be installed here; its tests will be skipped" >&2
  fi
  _state "$extra" > "$venv/.ssdtune-$extra"
}

_up_to_date() {
  [ -x "$python" ] && [ "$(cat "$venv/.ssdtune-$1" 2>/dev/null)" = "$(_state "$1")" ]
}

# An environment with the extra serves those who ask for none.
if ! _up_to_date "${1:-}" && ! { [ -z "${1:-}" ] && _up_to_date dev; }; then
  _install "${1:-}"
fi
