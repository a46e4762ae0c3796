/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Writes a file in small pieces, as a program does that knows nothing of ioshape, and prints how
 * many nanoseconds of processor time a call takes in the fastest round. Other programs only ever
 * add to that. A round writes so much that the preload library looks at the file twice. preload.py
 * compares the program with the library and without.
 */
#include <fcntl.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>

#define PIECE_BYTES 4096
#define FILE_PIECES 4096   /* then the program begins at the start again */
#define ROUND_PIECES 16384 /* 64 MiB: IOSHAPE_PRELOAD_BYTES */
#define ROUNDS 24

/* Returns the processor time of this process: a write to memory does not wait. */
static double now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
	return (double)now.tv_sec * 1e9 + (double)now.tv_nsec;
}

/* Returns the nanoseconds that a call takes, the mean of a round, or a negative number. */
static double round_ns(int fd)
{
	static char piece[PIECE_BYTES];
	const double begin = now_ns();

	for (int call = 0; call < ROUND_PIECES; call++) {
		if (call % FILE_PIECES == 0 && lseek(fd, 0, SEEK_SET) != 0)
			return -1;
		if (write(fd, piece, sizeof(piece)) != PIECE_BYTES)
			return -1;
	}
	return (now_ns() - begin) / ROUND_PIECES;
}

int main(int argc, char **argv)
{
	double fastest = 1e9, ns;
	int fd;

	if (argc != 2)
		return 2;
	fd = open(argv[1], O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
	for (int round = 0; round < ROUNDS; round++) {
		ns = round_ns(fd);
		if (ns < 0)
			return 1;
		fastest = ns < fastest ? ns : fastest;
	}
	printf("%.1f\n", fastest);
	return close(fd) != 0;
}
