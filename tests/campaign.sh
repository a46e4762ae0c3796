#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Tries what is promised, for hours if you like; see usage.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() {
	cat <<'END'
Usage: tests/campaign.sh [KIND...] [--seconds S] [--seed N]
       tests/campaign.sh [KIND...] --short
       tests/campaign.sh --replay KIND SEED
       tests/campaign.sh --keep | --kinds | --help

Installs what is missing (see tests/support/setup.sh), builds, and makes trials of the kinds that are
named, or of all in turn. docs/reliability.md says what each kind tries. The next run goes on where
the last one ended: the ledger, tests/campaign/ledger.jsonl, gets a line for each slice of trials. Any
signal ends the campaign, and the ledger has what was done.

  --seconds S          so long for each kind (default: 600)
  --seed N             from the seed N on; the ledger gets nothing
  --short              a few trials of each kind, with nothing that earlier ones left; always the same
  --replay KIND SEED   only this trial; the ledger gets nothing
  --keep               packs what the fuzzers found worth keeping into tests/c/fuzz/kept.tar.xz
  --kinds              lists the kinds

What a trial finds is printed and is in the ledger. The exit status is 0 if nothing was found, 77 if a
kind cannot be tried on this machine.
END
}

main() {
	if [[ " $* " == *" --help "* || " $* " == *" -h "* ]]; then
		usage
		exit 0
	fi
	if [[ " $* " != *" --kinds "* ]]; then
		tests/support/setup.sh long
		tests/support/build.sh build/gcc
		tests/support/build.sh build/asan
		tests/support/package.sh
	fi
	# shellcheck source=tests/support/environment.sh
	. tests/support/environment.sh
	PYTHONPATH=$(python tests/support/tree.py) exec python -m tests.campaign "$@"
}

# As a whole, so that the script may be edited while it runs.
main "$@"
