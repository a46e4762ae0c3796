#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# localize.sh FROM.a TO.a FOLDER OBJCOPY AR COMPILER...: all of FROM.a as one object in TO.a that shows
# only the symbols that a shared library would. FOLDER is for what lies between.
set -eu

from=$1
to=$2
folder=$3
objcopy=$4
ar=$5
shift 5

mkdir -p "$folder"
"$@" -r -nostdlib -o "$folder/ioshape.o" -Wl,--whole-archive "$from" -Wl,--no-whole-archive
"$objcopy" --localize-hidden "$folder/ioshape.o"
rm -f "$to"
"$ar" crD "$to" "$folder/ioshape.o"
