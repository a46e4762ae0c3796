/* SPDX-License-Identifier: Apache-2.0 */
/* Mounts, serves, unmounts. */
#include "stripefs.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/fuse.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

/* How many requests the kernel has under way. */
enum { MAX_BACKGROUND = 4096 };

/* The head of a write request: its data come behind it. */
enum { WRITE_HEAD = sizeof(struct fuse_in_header) + sizeof(struct fuse_write_in) };

static volatile sig_atomic_t told_to_end;

/* Signals come while it waits, never between a look at what they say and the waiting. */
static sigset_t while_waiting;

static void end(int signal_number)
{
	(void)signal_number;
	told_to_end = 1;
}

static void do_init(void *unused, struct fuse_conn_info *connection)
{
	const unsigned int can = connection->capable;

	(void)unused;
	connection->max_write = BLOCK_BYTES;
	connection->max_readahead = BLOCK_BYTES;
	connection->max_background = MAX_BACKGROUND;
	connection->congestion_threshold = MAX_BACKGROUND;
	connection->time_gran = 1;
	/* There is no other client that could have changed something. */
	connection->want &= ~(unsigned int)(FUSE_CAP_AUTO_INVAL_DATA | FUSE_CAP_READDIRPLUS |
					    FUSE_CAP_READDIRPLUS_AUTO | FUSE_CAP_SPLICE_READ |
					    FUSE_CAP_SPLICE_WRITE | FUSE_CAP_SPLICE_MOVE |
					    FUSE_CAP_ASYNC_DIO | FUSE_CAP_WRITEBACK_CACHE);
	connection->want |= can & (FUSE_CAP_IOCTL_DIR | FUSE_CAP_NO_OPENDIR_SUPPORT |
				   FUSE_CAP_PARALLEL_DIROPS | FUSE_CAP_ATOMIC_O_TRUNC);
	if (options.direct == DIRECT_PARALLEL)
		connection->want |= can & FUSE_CAP_ASYNC_DIO;
	if (options.cache == CACHE_BACK)
		connection->want |= can & FUSE_CAP_WRITEBACK_CACHE;
}

static ssize_t receive(int device, void *buffer, size_t room, void *unused)
{
	(void)unused;
	return read(device, buffer, room);
}

/* Answers what a lost server would not; false: it is not for us to say. */
static bool refuse_lost(int device, const char *buffer)
{
	const struct fuse_in_header *head = (const void *)buffer;
	const struct fuse_out_header answer = {
		.len = sizeof(answer),
		.error = -faults.lost,
		.unique = head->unique,
	};

	switch (head->opcode) {
	case FUSE_FORGET:
	case FUSE_BATCH_FORGET:
	case FUSE_INTERRUPT:
	case FUSE_RELEASE:
	case FUSE_RELEASEDIR:
	case FUSE_DESTROY:
	case FUSE_INIT:
		return false;
	}
	(void)!write(device, &answer, sizeof(answer));
	return true;
}

/* One request; false: there is none. */
static bool serve_request(struct fuse_session *session)
{
	const int device = fuse_session_fd(session);
	struct fuse_buf buffer = { 0 };
	int bytes;

	if (!staged_block)
		staged_block = store_take();
	if (!staged_block) {
		/* Nothing is left: what is read now goes where nothing is kept. */
		static char *spare;

		if (!spare)
			spare = aligned_alloc(PAGE, BLOCK_BYTES + 4 * PAGE);
		if (!spare)
			abort();
		buffer.mem = spare + HEAD_ROOM - WRITE_HEAD;
	} else {
		buffer.mem = store_block(staged_block) - WRITE_HEAD;
	}
	bytes = fuse_session_receive_buf(session, &buffer);
	if (bytes <= 0)
		return false;
	if (!faults.lost || !refuse_lost(device, buffer.mem))
		fuse_session_process_buf(session, &buffer);
	return true;
}

static void wait_until(struct pollfd *files, uint64_t next_ns)
{
	const uint64_t now = now_ns();
	struct timespec pause = { 0 };

	if (next_ns > now) {
		pause.tv_sec = (time_t)((next_ns - now) / NS_PER_S);
		pause.tv_nsec = (long)((next_ns - now) % NS_PER_S);
	}
	ppoll(files, 3, next_ns == UINT64_MAX ? NULL : &pause, &while_waiting);
}

static void serve(struct fuse_session *session, int listener)
{
	/* Whoever holds the other end of a pipe that is our input wants us as long as it lives. */
	struct stat input;
	const bool held = !fstat(STDIN_FILENO, &input) && S_ISFIFO(input.st_mode);
	struct pollfd files[3] = {
		{ .fd = fuse_session_fd(session), .events = POLLIN },
		{ .fd = listener, .events = POLLIN },
		{ .fd = held ? STDIN_FILENO : -1 },
	};

	while (!fuse_session_exited(session) && !told_to_end) {
		uint64_t next_ns;

		files[0].events = faults.frozen ? 0 : POLLIN;
		if (!faults.frozen && serve_request(session)) {
			model_run();
			continue;
		}
		next_ns = faults.frozen ? UINT64_MAX : model_run();
		files[0].revents = files[1].revents = files[2].revents = 0;
		wait_until(files, next_ns);
		if (files[1].revents)
			control_serve(listener);
		if (files[0].revents & POLLERR || files[2].revents)
			break;
	}
}

static struct fuse_session *mount_session(void)
{
	static struct fuse_lowlevel_ops operations = { .init = do_init };
	const struct fuse_custom_io device = { .writev = answer_send, .read = receive };
	char mount_options[512];
	char *arguments[] = { (char[]){ "stripefs" }, (char[]){ "-o" }, mount_options };
	struct fuse_args args = FUSE_ARGS_INIT(3, arguments);
	struct fuse_session *session;

	snprintf(mount_options, sizeof(mount_options),
		 "fsname=%s,subtype=stripefs,default_permissions%s", options.fsname,
		 geteuid() ? "" : ",allow_other");
	names_operations(&operations);
	io_operations(&operations);
	attributes_operations(&operations);
	play_operations(&operations);
	session = fuse_session_new(&args, &operations, sizeof(operations), NULL);
	fuse_opt_free_args(&args);
	if (!session || fuse_session_mount(session, options.mountpoint))
		exit(1);
	if (fuse_session_custom_io(session, &device, fuse_session_fd(session)))
		exit(1);
	fcntl(fuse_session_fd(session), F_SETFL, O_NONBLOCK);
	return session;
}

int main(int count, char **arguments)
{
	const struct sigaction ending = { .sa_handler = end };
	struct fuse_session *session;
	sigset_t ends;
	char *path;
	int listener, result;

	options_parse(count, arguments);
	path = realpath(options.mountpoint, NULL);
	if (!path) {
		fprintf(stderr, "stripefs: %s: %s\n", options.mountpoint, strerror(errno));
		return 1;
	}
	/* Timers as exact as the machine can; and storage that does not wait for its clients'
	 * processor. */
	prctl(PR_SET_TIMERSLACK, 1UL);
	setpriority(PRIO_PROCESS, 0, -15);
	sigemptyset(&ends);
	sigaddset(&ends, SIGTERM);
	sigaddset(&ends, SIGINT);
	sigprocmask(SIG_BLOCK, &ends, &while_waiting);
	sigdelset(&while_waiting, SIGTERM);
	sigdelset(&while_waiting, SIGINT);
	sigaction(SIGTERM, &ending, NULL);
	sigaction(SIGINT, &ending, NULL);
	result = store_open(options.backing, options.memory);
	if (result) {
		fprintf(stderr, "stripefs: %s: %s\n", options.backing, strerror(-result));
		return 1;
	}
	if (options.log)
		log_open(options.log);
	model_open();
	tree_open();
	statistics_reset();
	sysfs_open(options.backing);
	listener = control_open(options.backing);
	session = mount_session();
	/* The kernel's first request comes before anything can be asked. */
	while (!fuse_session_exited(session) && !told_to_end && !serve_request(session))
		usleep(100);
	printf("mounted\n");
	fflush(stdout);
	serve(session, listener);
	fuse_session_unmount(session);
	fuse_session_destroy(session);
	free(path);
	return 0;
}
