/* SPDX-License-Identifier: Apache-2.0 */
/* Time, processor time and memory of this process. */
#define _GNU_SOURCE
#include "bench.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

uint64_t now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

double seconds_since(uint64_t began_ns)
{
	return (double)(now_ns() - began_ns) / 1e9;
}

/* Returns the processor time of all threads. Workers of io_uring count because the kernel makes
 * them threads of this process. */
static double cpu_s(void)
{
	struct rusage usage;

	getrusage(RUSAGE_SELF, &usage);
	return (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
	       (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) / 1e6;
}

void cost_begin(struct cost *cost)
{
	cost->began_cpu_s = cpu_s();
	cost->began_ns = now_ns();
}

void cost_end(const struct cost *cost)
{
	uint64_t ended_ns = now_ns();

	answer_number("seconds", (double)(ended_ns - cost->began_ns) / 1e9);
	answer_number("cpu_seconds", cpu_s() - cost->began_cpu_s);
	answer_number("began_s", (double)cost->began_ns / 1e9);
	answer_number("ended_s", (double)ended_ns / 1e9);
}

static uint64_t status_bytes(const char *field)
{
	FILE *file = fopen("/proc/self/status", "re");
	char line[256];
	uint64_t kib = 0;

	if (!file)
		fail("cannot read /proc/self/status");
	while (fgets(line, sizeof(line), file)) {
		if (!strncmp(line, field, strlen(field)))
			sscanf(line + strlen(field), ": %" SCNu64, &kib);
	}
	fclose(file);
	return kib * 1024;
}

uint64_t memory_reset_peak(void)
{
	int fd = open("/proc/self/clear_refs", O_WRONLY | O_CLOEXEC);

	/* Writing 5 makes the kernel reset the peak of resident memory. */
	if (fd < 0 || write(fd, "5", 1) != 1)
		fail("cannot reset the peak of resident memory (/proc/self/clear_refs)");
	close(fd);
	return status_bytes("VmRSS");
}

void memory_answer(uint64_t before)
{
	uint64_t peak = status_bytes("VmHWM");

	answer_number("extra_bytes", peak > before ? (double)(peak - before) : 0);
}
