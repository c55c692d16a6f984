#!/bin/sh
# Starts one SDK worker: the command of a PROCESS environment, run by a TaskManager with --id=... and addresses.
# BOOT is Beam's boot program, VENV the virtual environment of the submitter.  Boot would make an empty one of its own.
set -eu
export PATH="$VENV/bin:$PATH" VIRTUAL_ENV="$VENV" RUN_PYTHON_SDK_IN_DEFAULT_ENVIRONMENT=1
exec "$BOOT" -semi_persist_dir "$(mktemp -d)" "$@"
