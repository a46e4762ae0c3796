/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Orders to a running stripefs: one line each, through the socket "control" in the backing folder.
 * The socket works also while stripefs is frozen.
 *
 *   reset                  begin the statistics again
 *   statistics             answer with the statistics
 *   target N full|failing|slow FACTOR|well
 *   freeze                 stop answering requests of the kernel, until
 *   restore                end this and all faults
 */
#include "stripefs.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

bool frozen;

static int do_target(const char *words)
{
	unsigned int index;
	double factor = 1;
	char what[16];
	const int count = sscanf(words, "%u %15s %lf", &index, what, &factor);
	struct target *target;

	if (count < 2 || index >= options.targets || factor <= 0)
		return -EINVAL;
	target = &targets[index];
	if (strcmp(what, "full") == 0) {
		target->full = true;
	} else if (strcmp(what, "failing") == 0) {
		target->failing = true;
	} else if (strcmp(what, "slow") == 0 && count == 3) {
		target->slowness = factor;
	} else if (strcmp(what, "well") == 0) {
		target->full = target->failing = false;
		target->slowness = 1;
	} else {
		return -EINVAL;
	}
	sysfs_renew();
	return 0;
}

static int control_do(const char *sentence)
{
	if (strncmp(sentence, "target ", 7) == 0)
		return do_target(sentence + 7);
	if (strcmp(sentence, "reset") == 0) {
		statistics_reset();
	} else if (strcmp(sentence, "freeze") == 0) {
		frozen = true;
	} else if (strcmp(sentence, "restore") == 0) {
		frozen = false;
		for (unsigned int i = 0; i < options.targets; i++) {
			targets[i].full = targets[i].failing = false;
			targets[i].slowness = 1;
		}
		sysfs_renew();
	} else {
		return -EINVAL;
	}
	return 0;
}

int control_open(const char *folder)
{
	struct sockaddr_un address = { .sun_family = AF_UNIX };
	const int listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

	if (listener < 0 || snprintf(address.sun_path, sizeof(address.sun_path), "%s/control",
				     folder) >= (int)sizeof(address.sun_path)) {
		fprintf(stderr, "stripefs: %s/control is too long a path for a socket\n", folder);
		exit(1);
	}
	unlink(address.sun_path);
	if (bind(listener, (struct sockaddr *)&address, sizeof(address)) || listen(listener, 16)) {
		fprintf(stderr, "stripefs: cannot listen at %s: %s\n", address.sun_path,
			strerror(errno));
		exit(1);
	}
	return listener;
}

void control_serve(int listener)
{
	const int peer = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
	const struct timeval soon = { .tv_sec = 1 };
	char sentence[256], answer[32];
	ssize_t count;

	if (peer < 0)
		return;
	setsockopt(peer, SOL_SOCKET, SO_RCVTIMEO, &soon, sizeof(soon));
	count = recv(peer, sentence, sizeof(sentence) - 1, 0);
	if (count > 0) {
		sentence[count] = '\0';
		if (strcmp(sentence, "statistics") == 0) {
			char *text = statistics_text();

			(void)!send(peer, text, strlen(text), MSG_NOSIGNAL);
			free(text);
		} else {
			count = snprintf(answer, sizeof(answer), "%d", -control_do(sentence));
			(void)!send(peer, answer, (size_t)count, MSG_NOSIGNAL);
		}
	}
	close(peer);
}
