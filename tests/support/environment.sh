# shellcheck shell=bash
# SPDX-License-Identifier: Apache-2.0
# What tests/run.sh and tests/campaign.sh run in; they source it.
export PATH="$PWD/.venv/bin:$PATH"
# Programs of all kinds, also those that tests start, must not read or write the user's own settings.
export PYTHONDONTWRITEBYTECODE=1
unset "${!IOSHAPE_@}"
