#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Runs real programs, for tests/support/preloaded_table.py: preloaded_programs.sh NAME.
#
# Each function runs in an empty folder and stops at the first command that fails. INPUTS has the
# files of preloaded.make_inputs(), and OTHER is an empty folder on another filesystem. A function
# removes the files that differ in each run, such as those that hold times.
# shellcheck disable=SC2016 # the started shells expand their variables
set -euo pipefail

random=$INPUTS/random.bin # 3 MiB
sparse=$INPUTS/sparse.bin # 24 MiB, most of them holes
text=$INPUTS/text.txt
project=$INPUTS/project # C sources

fails() { # fails COMMAND...: checks that the command fails, and says how
	local status=0
	"$@" || status=$?
	echo "status $status"
	[ $status != 0 ]
}

# ---- Files ---------------------------------------------------------------------------------------

run_cp() {
	cp "$random" copy
	cp --reflink=auto "$random" reflink
	cp --sparse=always "$sparse" sparse
	cp --sparse=never "$sparse" full
	cp "$sparse" auto
	cp -a "$project" project
	cp -l copy link
	fails cp "$random" /dev/full
	cmp copy "$random"
	cmp sparse full
}

run_dd() {
	dd if="$random" of=plain bs=1M status=none
	dd if="$random" of=direct bs=64K oflag=direct status=none
	dd if="$random" of=synced bs=100000 oflag=dsync count=9 status=none
	dd if="$random" of=appended bs=64K oflag=append conv=notrunc status=none
	dd if="$random" of=appended bs=64K oflag=append conv=notrunc,fsync status=none
	dd if="$random" of=plain bs=4K seek=100 skip=7 count=300 conv=notrunc,fdatasync status=none
	dd if="$random" of=plain bs=1000 seek=1 count=900 conv=notrunc,swab status=none
	dd if="$sparse" of=sparse bs=64K conv=sparse status=none
	fails dd if="$random" of=plain conv=excl status=none
	fails dd if="$random" of=/dev/full bs=1M status=none
	dd of=piped bs=300000 iflag=fullblock status=none < <(cat "$random")
}

run_tar() {
	tar --sort=name -cf all.tar -C "$INPUTS" random.bin sparse.bin project
	tar --sort=name -Scf sparse.tar -C "$INPUTS" sparse.bin
	tar --sort=name -I 'gzip -n' -cf all.tar.gz -C "$INPUTS" random.bin project
	tar -rf all.tar -C "$INPUTS" text.txt
	mkdir out sparse
	tar -xf all.tar -C out
	tar -Sxf sparse.tar -C sparse
	tar -cf - -C "$INPUTS" random.bin | tar -xOf - | cmp - "$random"
	tar -tvf all.tar.gz
}

# Between filesystems mv and install copy.
run_mv() {
	cp "$random" file
	mv file "$OTHER/moved"
	mv "$OTHER/moved" back
	install -m 640 "$random" installed
	install -D back "$OTHER/a/b/c"
	mv "$OTHER/a" .
	ln back hard
	ln -s back soft
	mv -n back installed
	touch -r "$random" installed
	stat -c '%Y %s %a' installed
}

run_cat() {
	split -b 700000 "$random" part-
	split -n l/4 --filter='cat >$FILE.txt' "$text" line-
	cat part-* >whole
	cat part-* >>whole
	tee one two <whole >three
	tee -a two <one >four
	head -c 1500000 whole >first
	tail -c +1000000 whole >last
	tac "$text" >reversed
	cat <whole | cat | dd bs=64K of=five status=none
	if cat one >/dev/full; then return 1; fi
}

# Each writes while it waits for the next one to read.
run_pipe() {
	cat "$random" "$random" | tee first | tee second | dd of=third status=none
}

run_truncate() {
	truncate -s 3M hole
	fallocate -l 2M full
	fallocate -p -o 0 -l 1M full
	fallocate -l 1M -o 4M hole
	cp "$random" gone
	shred -n 1 -z gone
	cp "$random" away
	shred -u away
}

run_sort() {
	sort -S 200K -T . --parallel=2 "$text" -o sorted
	sort -S 200K -T . --compress-program=gzip -n "$text" | uniq -c >counted
	shuf --random-source="$random" "$text" >shuffled
	comm -12 sorted <(sort shuffled) | wc
}

run_find() {
	cp -r "$project" tree
	find tree -name '*.c' -exec sed -i 's/static/STATIC/' {} +
	find tree -name '*.h' -print0 | sort -z | xargs -0 -n 3 -P 2 cp -t .
	find tree -type f -exec cat {} + | sort >all
	md5sum all
}

run_patch() {
	sed 's/9 line/nine/' "$text" >changed
	diff -u --label a --label b "$text" changed >text.patch || [ $? = 1 ]
	cp "$text" text.txt
	patch text.txt text.patch
	cmp text.txt changed
}

run_gzip() {
	gzip -nc "$random" >a.gz
	cp a.gz b.gz
	gunzip b.gz
	zcat a.gz | cmp - b
}

run_zip() {
	cp -r "$project" "$random" .
	find . -exec touch -h -d @1600000000 {} +
	find project random.bin | sort | zip -qX all.zip -@
	unzip -q all.zip -d out
	zip -qT all.zip
	diff -r project out/project
}

run_openssl() {
	local key vector
	key=$(printf '%064d' 1)
	vector=$(printf '%032d' 2)
	openssl enc -aes-256-cbc -K "$key" -iv "$vector" -in "$random" -out encrypted
	openssl enc -d -aes-256-cbc -K "$key" -iv "$vector" -in encrypted -out decrypted
	cmp decrypted "$random"
	openssl dgst -sha256 encrypted
	openssl base64 -in encrypted -out text
}

run_mkfs() {
	truncate -s 32M disk
	mkfs.ext4 -q -F -d "$project" disk
	e2fsck -fn disk >/dev/null 2>&1
	debugfs -R 'ls -p /format' disk 2>/dev/null | sort | cut -d/ -f3,6,7
	debugfs -R 'cat /format/format.h' disk 2>/dev/null | cmp - "$project/format/format.h"
	truncate -s 320M big
	mkfs.xfs -q big
	rm disk big
}

# ---- Shells and scripts --------------------------------------------------------------------------

run_bash() {
	local n line sorter
	exec 3>three 4>>four 5<>five
	for n in {1..400}; do
		printf '%04000d\n' "$n" >&3
		echo "$n" >&4
		echo "$n"
	done >out 2>&1
	exec 6>&3 3>&-
	seq 60000 >&6
	exec 6>&- 4>&- 5>&-
	{ echo out && echo err >&2; } &>both
	cat <<<"$(seq 30000)" >here
	exec 7> >(sort -n >sorted)
	sorter=$!
	seq 50000 >&7
	exec 7>&-
	wait $sorter
	coproc cat
	echo to the coprocess >&"${COPROC[1]}"
	read -r line <&"${COPROC[0]}"
	echo "$line"
	(trap 'echo trap >trapped' EXIT && seq 30000 >last)
	seq 70000 | while read -r n; do echo "$n"; done >loop
	set -C
	echo no >out || echo "out exists"
	echo yes >|both
}

run_sh() {
	sh -c 'exec 7>seven; seq 40000 >&7; (seq 5 >&7); exec 7>&-; trap "echo the end" EXIT; exit 0'
	awk '{ print >("out-" ($1 % 3)) } END { close("out-1"); system("wc out-1") }' "$text"
	awk 'BEGIN { while (i++ < 90000) print i | "sort -n >piped" }'
}

run_perl() {
	fails perl -e '
		open(my $first, ">", "first") or die;
		print $first "x" x 1000, "\n" for 1 .. 2000;
		open(my $second, ">&", $first) or die;
		syswrite($second, "y" x 300000);
		truncate($first, 1500000) or die;
		close $first;
		close $second;
		sysopen(my $third, "third", 0102, 0600) or die;
		seek($third, 100000, 0);
		print $third "z" x 70000;
		if (!fork) { print $third "child" x 50000; close $third; exit 7 }
		wait;
		print $? >> 8, "\n";
		open(my $pipe, "|-", "cat >piped");
		print $pipe "p" x 400000;
		close $pipe;
		rename "first", "renamed";
		print -s "renamed", "\n";
		open(STDOUT, ">", "out");
		print "o" x 99999;
		die "the end\n"'
}

run_renamed() {
	local writer
	(for _ in {1..30}; do head -c 100000 "$random"; done) >log &
	writer=$!
	until [ -e log ]; do :; done
	mv log log.1
	wait $writer
	exec 3>hidden
	rm hidden
	cat log.1 >&3
	cmp log.1 /proc/self/fd/3
}

run_limits() {
	(ulimit -n 8 && cat "$random" >few)
	(ulimit -v 60000 && cp "$random" little-memory)
	fails bash -c 'trap "" XFSZ; ulimit -f 200; cat "$1" >short' bash "$random"
	fails bash -c 'ulimit -f 200; exec cat "$1" >too-large' bash "$random" 2>/dev/null
	fails timeout 0.2 cat /dev/zero >/dev/null
	fails timeout -s KILL 0.3 cp /dev/zero endless 2>/dev/null
	rm endless
	(exec <&- >&- 2>&- && cp "$random" closed)
	fails bash -c 'set -o pipefail; yes | head -c 3000000 >yes'
}

# Its output is a terminal.
run_terminal() {
	script -qec 'tty >/dev/null; seq 30000 >out; cp out copy; tail -1 copy' /dev/null </dev/null
}

run_python() { # run_python WAY
	python "$INPUTS/preloaded_writers.py" "$1"
}

run_c() { # run_c WAY
	exec "$INPUTS/writers" "$1"
}

run_descriptors() { # run_descriptors SEED STEPS
	exec "$INPUTS/descriptors" "$@"
}

run_static() { # run_static WAY
	exec "$INPUTS/writers-static" "$1"
}

# ---- Builds --------------------------------------------------------------------------------------

run_git() {
	git init -q -b main one
	git -C one config pack.threads 1
	cp -r "$project" "$random" one
	git -C one add .
	git -C one commit -qm first
	sed -i 's/int/long/' one/project/fs/*.c
	git -C one commit -qam second
	git -C one checkout -qb side HEAD^
	cp "$text" one
	git -C one add .
	git -C one commit -qm side
	git -C one checkout -q main
	git -C one merge -qm merge side
	git -C one gc -q --aggressive
	git -C one fsck --strict
	git clone -q one two
	git clone -q --bare --no-local one three.git
	git -C one bundle create -q ../bundle --all
	git -C one archive -o ../main.tar main
	git -C one log --oneline --all
	git -C two status --short
	rm -rf {one,two}/.git/{index,hooks} three.git/hooks one/.git/ORIG_HEAD
}

run_make() {
	cp -r "$project"/* .
	echo 'int main(void) { return 0; }' >main.c
	cat >Makefile <<-'END'
		.RECIPEPREFIX = >
		objects := $(patsubst %.c,%.o,$(wildcard fs/*.c))
		main: main.o liball.a
		> gcc -g -o $@ $^
		> strip -o stripped $@
		> objcopy -O binary $@ binary
		liball.a: $(objects)
		> ar rcs $@ $^
		%.o: %.c
		> gcc -g -O1 -pipe -w -DIOSHAPE_VERSION='"1"' -I. -Iinclude -c -o $@ $<
	END
	make -s -j3
	./main
	nm liball.a
}

small_sources() {
	mkdir source
	echo 'int p(void) { return 1; }' >source/p.c
	echo 'int main(void) { return 0; }' >source/q.c
}

run_meson() {
	small_sources
	cat >source/meson.build <<-'END'
		project('p', 'c')
		configure_file(output: 'config.h', configuration: {'A': 1}, install_dir: 'include')
		library('p', 'p.c', install: true)
		executable('q', 'q.c', install: true)
	END
	# It draws a progress bar on stderr, whose lines depend on the time.
	meson setup build source --prefix="$PWD/prefix" >/dev/null 2>&1
	ninja -C build >/dev/null
	DESTDIR=$PWD/image meson install -C build >/dev/null
	build/q
	rm -rf build
}

run_cmake() {
	small_sources
	cat >source/CMakeLists.txt <<-'END'
		cmake_minimum_required(VERSION 3.18)
		project(p C)
		add_library(p SHARED p.c)
		add_executable(q q.c)
	END
	CC=clang cmake -S source -B build >/dev/null
	cmake --build build -j 2 >/dev/null
	build/q
	cp build/q build/libp.so .
	rm -rf build
}

run_streams() {
	cat >main.cpp <<-'END'
		#include <fstream>
		#include <iostream>
		#include <vector>
		int main()
		{
			std::ofstream file("stream", std::ios::binary);
			std::vector<char> block(1 << 20, 'x');
			for (int n = 0; n < 4; n++)
				file.write(block.data(), block.size());
			file.seekp(100);
			file << "middle" << std::flush;
			std::cout << file.tellp() << std::endl;
		}
	END
	g++ -O1 main.cpp -o main
	./main
}

run_pip() {
	local name=demo-1.0-py3-none-any.whl
	mkdir -p wheel/demo-1.0.dist-info wheel/demo
	cp "$random" wheel/demo/data.bin
	echo 'name = 1' >wheel/demo/__init__.py
	cat >wheel/demo-1.0.dist-info/WHEEL <<-'END'
		Wheel-Version: 1.0
		Generator: preloaded_programs.sh
		Root-Is-Purelib: true
		Tag: py3-none-any
	END
	printf 'Metadata-Version: 2.1\nName: demo\nVersion: 1.0\n' >wheel/demo-1.0.dist-info/METADATA
	printf 'demo/__init__.py,,\ndemo/data.bin,,\n' >wheel/demo-1.0.dist-info/RECORD
	find wheel -exec touch -d @1600000000 {} +
	(cd wheel && find . -type f | sort | zip -qX ../$name -@)
	python -m pip install -q --disable-pip-version-check --no-index --no-compile --no-deps \
		--no-cache-dir --root-user-action ignore --target site ./$name
	PYTHONPATH=site python -c 'import demo; print(demo.name)'
}

run_dpkg() {
	mkdir -p tree/DEBIAN tree/usr/share
	cp "$random" tree/usr/share
	cat >tree/DEBIAN/control <<-'END'
		Package: p
		Version: 1
		Architecture: all
		Maintainer: A <a@example.org>
		Description: p
	END
	dpkg-deb --root-owner-group -Zgzip -b tree p.deb
	dpkg-deb -x p.deb out
	dpkg-deb -c p.deb
}

# ---- Servers and tools ---------------------------------------------------------------------------

ask() { # ask WORD...: the Redis of this folder
	redis-cli -s redis.sock "$@"
}

start_redis() {
	redis-server redis.conf >log &
	until ask ping >/dev/null 2>&1; do
		sleep 0.1
	done
}

run_redis() {
	local n
	mkdir data
	cat >redis.conf <<-END
		port 0
		unixsocket $PWD/redis.sock
		dir $PWD/data
		appendonly yes
		appendfsync always
		save ""
	END
	start_redis
	for n in {1..3000}; do
		printf 'SET key-%d %0500d\n' "$n" "$n"
	done | ask >/dev/null
	ask BGREWRITEAOF
	while ask INFO persistence | grep -q in_progress:1; do
		sleep 0.1
	done
	ask BGSAVE
	ask INCR counter
	ask SHUTDOWN
	wait
	start_redis
	ask DBSIZE
	ask GET key-77
	ask GET counter
	ask SHUTDOWN
	wait
	rm -r data log
}

run_fio() {
	local engine
	for engine in psync pvsync2 libaio io_uring mmap sync vsync; do
		fio --name=$engine --ioengine=$engine --rw=write --bs=64k --size=2m --verify=crc32c \
			--do_verify=1 --end_fsync=1 --output=/dev/null
	done
	fio --name=random --ioengine=psync --rw=randwrite --bs=4k --size=2m --numjobs=2 --output=/dev/null
	ls
	rm -- *.0.0 *.1.0 # they hold times
}

run_valgrind() {
	valgrind -q --error-exitcode=9 cp "$random" copy
}

run_strace() {
	strace -f -o /dev/null bash -c 'cp "$1" copy; cat copy >again' bash "$random"
}

# The loader ignores the library for programs with the bits setuid and setgid.
run_users() {
	chmod 777 . "$OTHER"
	cp "$random" "$OTHER/from"
	chmod 644 "$OTHER/from"
	setpriv --reuid=65534 --regid=65534 --clear-groups cp "$OTHER/from" "$OTHER/nobody"
	mv "$OTHER/nobody" .
	cp "$(command -v cat)" "$OTHER/cat"
	chmod 6755 "$OTHER/cat"
	setpriv --reuid=65534 --regid=65534 --clear-groups "$OTHER/cat" "$OTHER/from" >out
	su root -s /bin/sh -c "cat $OTHER/from >by-su"
	stat -c '%u %s' nobody
}

# ---- With --long ---------------------------------------------------------------------------------

run_rsync() {
	rsync -a "$INPUTS"/ one/
	rsync -aS --inplace one/ two/
	echo more >>one/text.txt
	rsync -a --append one/ two/
	rsync -ac --delete --exclude project one/ three/
	rm one/random.bin
	rsync -ai --delete one/ two/
}

run_cpio() {
	(cd "$INPUTS" && find project random.bin | sort | cpio -o --quiet --reproducible -H newc) >all.cpio
	mkdir out
	cpio -idm --quiet -D out <all.cpio
}

run_busybox() {
	busybox cp "$random" copy
	busybox dd if=copy of=two bs=100000 2>/dev/null
	busybox tar cf - copy two | busybox tar xf - -C "$OTHER"
	busybox sh -c 'busybox seq 30000 >out; busybox sort -rn out >sorted'
	cmp "$OTHER/two" "$random"
}

run_compressors() {
	xz -1 -T2 -kc "$random" >a.xz
	xz -dc a.xz | cmp - "$random"
	bzip2 -kc "$random" >a.bz2
	bzip2 -dc a.bz2 | cmp - "$random"
	zstd -q -T2 "$random" -o a.zst
	zstd -qd a.zst -o a
	lz4 -q "$random" a.lz4
	lz4 -qd a.lz4 b
	cmp a b
}

run_sqlite() {
	sqlite3 data.db 'pragma journal_mode = wal;
		create table t (n integer primary key, b blob);
		with recursive r(n) as (select 1 union all select n + 1 from r where n < 3000)
			insert into t select n, zeroblob(1000) from r;
		delete from t where n % 2;
		vacuum;
		select count(*), sum(length(b)) from t;
		pragma integrity_check;'
	sqlite3 data.db .dump >dump.sql
	sqlite3 two.db <dump.sql
}

run_gpg() {
	local options=(-q --batch --passphrase x --pinentry-mode loopback)
	mkdir -m 700 keys
	export GNUPGHOME=$PWD/keys
	gpg "${options[@]}" -c -o encrypted "$random"
	gpg "${options[@]}" -d -o decrypted encrypted
	gpgconf --kill all
	rm -r keys encrypted
}

run_node() {
	node -e '
		const fs = require("fs");
		const data = Buffer.alloc(300000, "n");
		fs.writeFileSync("sync", data);
		fs.appendFileSync("sync", data);
		const stream = fs.createWriteStream("stream");
		for (let n = 0; n < 20; n++) stream.write(data);
		stream.end(async () => {
			await fs.promises.copyFile("stream", "copied");
			const file = await fs.promises.open("opened", "w");
			for (let n = 0; n < 9; n++) await file.write(data, 0, data.length, n * data.length);
			await file.close();
			console.log(require("child_process").execSync("wc -c stream opened").toString());
		});'
}

run_java() {
	cat >Main.java <<-'END'
		import java.io.*;
		import java.nio.*;
		import java.nio.channels.*;
		import java.nio.file.*;

		public class Main {
			public static void main(String[] arguments) throws Exception {
				byte[] data = new byte[300000];
				try (var stream = new FileOutputStream("stream")) {
					for (int n = 0; n < 9; n++)
						stream.write(data);
				}
				try (var file = new RandomAccessFile("random", "rw")) {
					file.seek(100);
					file.write(data);
					file.setLength(200000);
				}
				try (var channel = FileChannel.open(Path.of("channel"),
						StandardOpenOption.CREATE, StandardOpenOption.WRITE)) {
					for (int n = 0; n < 9; n++)
						channel.write(ByteBuffer.wrap(data), n * 300000L);
					channel.force(true);
				}
				Files.copy(Path.of("stream"), Path.of("copied"));
				var child = new ProcessBuilder("wc", "-c", "copied").start();
				System.out.println(child.inputReader().readLine());
			}
		}
	END
	java Main.java
}

film() { # film OPTION... FILE: makes a short film
	ffmpeg -v error -nostdin -f lavfi -i testsrc=d=2:s=320x240:r=25 -bitexact -threads 1 "$@"
}

run_ffmpeg() {
	film -c:v rawvideo -pix_fmt yuv420p film.yuv
	film -c:v ffv1 film.mkv
	film -c:v mpeg4 -movflags faststart film.mp4
	ffprobe -v error -show_streams film.mp4
}

name=$1
shift
"run_$name" "$@"
