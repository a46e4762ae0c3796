/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Writes a file in small pieces, as a program does that knows nothing of ioshape, and prints how
 * many nanoseconds a call takes. preload.py compares it with the preload library and without.
 */
#include <fcntl.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>

#define PIECE_BYTES 4096
#define FILE_PIECES 4096 /* then the program begins at the start again */
#define CALLS 200000

static double now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (double)now.tv_sec * 1e9 + (double)now.tv_nsec;
}

int main(int argc, char **argv)
{
	static char piece[PIECE_BYTES];
	double begin;
	int fd;

	if (argc != 2)
		return 2;
	fd = open(argv[1], O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
	begin = now_ns();
	for (int call = 0; call < CALLS; call++) {
		if (call % FILE_PIECES == 0 && lseek(fd, 0, SEEK_SET) != 0)
			return 1;
		if (write(fd, piece, sizeof(piece)) != PIECE_BYTES)
			return 1;
	}
	printf("%.1f\n", (now_ns() - begin) / CALLS);
	return close(fd) != 0;
}
