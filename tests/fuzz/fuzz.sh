#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# fuzz.sh TARGET CORPUS FINDINGS SECONDS: fuzzes for so long. What is new goes to the folder FINDINGS, the
# inputs that fail go beside it; the corpus is only read.
set -eu

mkdir -p "$3"
# On a finding libFuzzer ends with 77 of its own accord, which meson takes for a skipped test.
exec "$1" -error_exitcode=1 -max_total_time="$4" -artifact_prefix="$3-" -print_final_stats=1 "$3" "$2"
