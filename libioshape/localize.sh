#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# localize.sh FROM.a MAP LIST TO.a FOLDER OBJCOPY AR COMPILER...: all of FROM.a as one object in TO.a that shows
# only the functions of MAP, and those of LIST under another name. FOLDER is for what lies between.
#
# LIST has the functions of the core that libioshape-tier calls: names like io_look must not meet those of other
# libraries in the same program.
set -eu

from=$1
map=$2
list=$3
to=$4
folder=$5
objcopy=$6
ar=$7
shift 7

mkdir -p "$folder"
sed -n 's/^[[:space:]]*\(ioshape_[a-z0-9_]*\);$/\1/p' "$map" >"$folder/shown"
sed 's/.*/ioshape_internal_&/' "$list" >>"$folder/shown"
sed 's/.*/& ioshape_internal_&/' "$list" >"$folder/renamed"
"$@" -r -nostdlib -o "$folder/whole.o" -Wl,--whole-archive "$from" -Wl,--no-whole-archive
"$objcopy" --redefine-syms="$folder/renamed" "$folder/whole.o" "$folder/renamed.o"
"$objcopy" --keep-global-symbols="$folder/shown" "$folder/renamed.o" "$folder/ioshape.o"
rm -f "$to"
"$ar" crD "$to" "$folder/ioshape.o"
