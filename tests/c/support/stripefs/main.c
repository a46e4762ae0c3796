/* SPDX-License-Identifier: Apache-2.0 */
/* Mounts the filesystem, serves requests and unmounts. */
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

/* most requests that the kernel has in flight */
enum { MAX_BACKGROUND = 4096 };

/* size of the header of a write request; the data follow it */
enum { WRITE_HEAD = sizeof(struct fuse_in_header) + sizeof(struct fuse_write_in) };

static volatile sig_atomic_t told_to_end;

uint64_t asking;
static struct mount mounts[MAX_MOUNTS];

/*
 * Signal mask while the server waits. Signals are blocked at all other times, so none arrives
 * between the check of the flag and the wait.
 */
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
	/* A change by another client becomes visible when a file is opened. */
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

/* Serves one request of a mount. Returns false if there is none. */
static bool serve_request(const struct mount *mount)
{
	struct fuse_buf buffer = { 0 };
	int bytes;

	if (!staged_block)
		staged_block = store_take();
	if (!staged_block) {
		/* The store is full: the request is read into a buffer that is discarded. */
		static char *spare;

		if (!spare)
			spare = aligned_alloc(PAGE, BLOCK_BYTES + 4 * PAGE);
		if (!spare)
			abort();
		buffer.mem = spare + HEAD_ROOM - WRITE_HEAD;
	} else {
		buffer.mem = store_block(staged_block) - WRITE_HEAD;
	}
	bytes = fuse_session_receive_buf(mount->session, &buffer);
	if (bytes <= 0)
		return false;
	asking = mount->bit;
	fuse_session_process_buf(mount->session, &buffer);
	return true;
}

/* Serves one request of each mount that has one. Returns false if none has. */
static bool serve_requests(void)
{
	bool served = false;

	for (unsigned int i = 0; i < options.mount_count; i++)
		served |= serve_request(&mounts[i]);
	return served;
}

/*
 * Waits for requests, orders or the next event. The first files are the mounts. Returns false if a
 * mount or the process that holds our standard input is gone.
 */
static bool wait_until(struct pollfd *files, uint64_t next_ns, int listener)
{
	const unsigned int count = options.mount_count;
	const struct timespec pause = next_ns == UINT64_MAX ? (struct timespec){ 0 } :
							      model_pause(next_ns);
	bool all = true;

	for (unsigned int i = 0; i < count + 2; i++)
		files[i].revents = 0;
	for (unsigned int i = 0; i < count; i++)
		files[i].events = frozen ? 0 : POLLIN;
	ppoll(files, count + 2, next_ns == UINT64_MAX ? NULL : &pause, &while_waiting);
	if (files[count].revents)
		control_serve(listener);
	for (unsigned int i = 0; i < count; i++)
		all = all && !(files[i].revents & POLLERR) &&
		      !fuse_session_exited(mounts[i].session);
	return all && !files[count + 1].revents;
}

static void serve(int listener)
{
	/*
	 * If the standard input is a pipe, stripefs ends with the process that holds its other end.
	 */
	struct stat input;
	const bool held = !fstat(STDIN_FILENO, &input) && S_ISFIFO(input.st_mode);
	struct pollfd files[MAX_MOUNTS + 2];
	bool all = true;

	for (unsigned int i = 0; i < options.mount_count; i++)
		files[i].fd = fuse_session_fd(mounts[i].session);
	files[options.mount_count] = (struct pollfd){ .fd = listener, .events = POLLIN };
	files[options.mount_count + 1] = (struct pollfd){ .fd = held ? STDIN_FILENO : -1 };
	while (all && !told_to_end) {
		uint64_t next_ns;

		if (!frozen && serve_requests()) {
			model_run();
			continue;
		}
		next_ns = frozen ? UINT64_MAX : model_run();
		all = wait_until(files, next_ns, listener);
	}
}

static void mount_session(struct mount *mount, const char *path)
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
	session = fuse_session_new(&args, &operations, sizeof(operations), mount);
	fuse_opt_free_args(&args);
	if (!session || fuse_session_mount(session, path))
		exit(1);
	if (fuse_session_custom_io(session, &device, fuse_session_fd(session)))
		exit(1);
	fcntl(fuse_session_fd(session), F_SETFL, O_NONBLOCK);
	mount->session = session;
	/*
	 * The kernel sends its first request during the mount, before the mount point can be used.
	 */
	while (!fuse_session_exited(session) && !told_to_end && !serve_request(mount))
		usleep(100);
}

static void mount_all(void)
{
	for (unsigned int i = 0; i < options.mount_count; i++) {
		char *path = realpath(options.mountpoints[i], NULL);

		if (!path) {
			fprintf(stderr, "stripefs: %s: %s\n", options.mountpoints[i],
				strerror(errno));
			exit(1);
		}
		mounts[i].bit = UINT64_C(1) << i;
		mount_session(&mounts[i], path);
		free(path);
	}
}

int main(int count, char **arguments)
{
	const struct sigaction ending = { .sa_handler = end };
	sigset_t ends;
	int listener, result;

	options_parse(count, arguments);
	/*
	 * Timers as exact as the machine allows. The high priority keeps the clients of this
	 * machine from delaying the simulated storage.
	 */
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
	model_open();
	tree_open();
	statistics_reset();
	sysfs_open(options.backing);
	listener = control_open(options.backing);
	mount_all();
	printf("mounted\n");
	fflush(stdout);
	serve(listener);
	for (unsigned int i = 0; i < options.mount_count; i++) {
		fuse_session_unmount(mounts[i].session);
		fuse_session_destroy(mounts[i].session);
	}
	return 0;
}
