/* SPDX-License-Identifier: Apache-2.0 */
/* Parameters: profiles, and what is said on the command line. */
#include "stripefs.h"

#include <errno.h>
#include <getopt.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

struct options options;

static const char help[] =
	"Usage: stripefs [OPTION]... --backing FOLDER MOUNTPOINT\n"
	"\n"
	"Mounts a filesystem that plays a parallel one: files are striped over storage targets, "
	"and every\n"
	"request takes the time that the model says. Runs until it is unmounted, or told to end "
	"by\n"
	"SIGTERM. Nothing survives that. tests/support/stripefs/README.md says what is modelled.\n"
	"\n"
	"Bytes may end in k, M, G, T (powers of 1000) or Ki, Mi, Gi, Ti (of 1024).\n"
	"\n"
	"What it is\n"
	"  --profile NAME         hdd (the default), ssd, nfs: sets what follows; say it first\n"
	"  --play NAME            lustre (the default), beegfs, ceph, nfs: what it says about "
	"layouts\n"
	"  --fsname NAME          the mount's source (stripefs); e.g. mgs@tcp:/storm\n"
	"  --backing FOLDER       where contents lie, the socket control and sys/; better in "
	"memory\n"
	"  --memory BYTES         how much contents there can be at most (4Gi)\n"
	"  --prefault BYTES       of that, made ready at once (0)\n"
	"\n"
	"Targets\n"
	"  --targets N            how many (8)\n"
	"  --bandwidth BYTES      of each, per second (60M)\n"
	"  --seek-ms MS           when a request does not go on where the last one ended (8)\n"
	"  --run BYTES            what the elevator serves in a row of one object (16Mi)\n"
	"  --latency-ms MS        of each request, besides (0)\n"
	"  --capacity BYTES       of each (64Gi)\n"
	"  --total-capacity BYTES of all together, as a quota (0: no limit)\n"
	"  --used N=BYTES         taken on target N by others; may be said for several\n"
	"  --pool NAME=N,N,...    a pool of targets; may be said for several\n"
	"  --server-cache BYTES   writes are answered when they are in the server's memory (0)\n"
	"  --link BYTES           into that memory, per second (0: no limit)\n"
	"\n"
	"Metadata server\n"
	"  --mds-latency-ms MS    (0.2)\n"
	"  --mds-rate N           operations per second (20000)\n"
	"\n"
	"Layout of new files\n"
	"  --stripe-size BYTES    a multiple of 64Ki (1Mi)\n"
	"  --stripe-count N       -1: all targets (1)\n"
	"  --progressive END:COUNT[:SIZE],...  several components; the last END is eof\n"
	"\n"
	"Client\n"
	"  --cache KIND           when a buffered write is answered: through (the default), when "
	"it is\n"
	"                         on the targets; back, when it is in the kernel's page cache; "
	"client, when\n"
	"                         it is in a client's memory, from where whole stripes leave at "
	"once\n"
	"  --window N             of a file: requests that such a client has under way (8)\n"
	"  --direct KIND          O_DIRECT: parallel (the default); threads (a call waits for its "
	"pieces,\n"
	"                         calls of several threads go on); serial (one write of a file at "
	"a time);\n"
	"                         none (EINVAL)\n"
	"  --direct-alignment N   what offsets and lengths of O_DIRECT are multiples of (4096)\n"
	"  --fallocate yes|no     (yes)\n"
	"  --rename-flags yes|no  RENAME_NOREPLACE and RENAME_EXCHANGE (yes)\n"
	"  --max-write BYTES      the largest request (1Mi)\n"
	"  --max-background N     how many requests the kernel has under way (4096)\n"
	"  --dirty-percent N      how much of the kernel's dirty memory may be ours (0: its own "
	"rule)\n"
	"\n"
	"What the real one does\n"
	"  --trap NAME            may be said for several:\n"
	"                         setstripe-ignored: the setstripe ioctl says yes and does "
	"nothing\n"
	"                         setxattr-ignored: so does setxattr of a layout\n"
	"                         no-default: a directory without default has no lustre.lov\n"
	"                         no-layout: no layout is told at all\n"
	"                         pool-refused: an unknown pool is EINVAL, not ignored\n"
	"  --swap-bytes           layouts are told in the other byte order\n"
	"\n"
	"  --log FILE             a line for each request that a target serves (CSV)\n"
	"  --help\n";

__attribute__((format(printf, 1, 2), noreturn)) static void refuse(const char *format, ...)
{
	va_list arguments;

	va_start(arguments, format);
	fprintf(stderr, "stripefs: ");
	vfprintf(stderr, format, arguments);
	fprintf(stderr, "; try --help\n");
	va_end(arguments);
	exit(2);
}

bool parse_bytes(const char *text, uint64_t *bytes)
{
	static const char units[] = "kMGT";
	char *end;
	const double number = strtod(text, &end);
	const char *unit;
	double factor = 1;

	if (end == text || number < 0)
		return false;
	unit = *end ? strchr(units, *end == 'K' ? 'k' : *end) : NULL;
	if (*end && !unit)
		return false;
	if (unit) {
		end++;
		for (const char *at = units; at <= unit; at++)
			factor *= *end == 'i' ? 1024 : 1000;
		end += *end == 'i';
	}
	*bytes = (uint64_t)(number * factor);
	return !*end && number * factor < 1e18;
}

static uint64_t bytes_of(const char *name, const char *text)
{
	uint64_t bytes;

	if (!parse_bytes(text, &bytes))
		refuse("--%s: \"%s\" is no number of bytes", name, text);
	return bytes;
}

static double number_of(const char *name, const char *text)
{
	char *end;
	const double number = strtod(text, &end);

	if (end == text || *end || !(number >= 0 && number < 1e15))
		refuse("--%s: \"%s\" is no number", name, text);
	return number;
}

/* Which of the names, which are separated by spaces. */
static unsigned int choice_of(const char *name, const char *text, const char *names)
{
	const size_t length = strlen(text);
	unsigned int index = 0;

	for (const char *at = names; *at; index++) {
		const size_t here = strcspn(at, " ");

		if (here == length && strncmp(at, text, length) == 0)
			return index;
		at += here + (at[here] == ' ');
	}
	refuse("--%s: \"%s\" is none of: %s", name, text, names);
}

static void set_profile(const char *name)
{
	static const double bandwidths[] = { 60e6, 250e6, 500e6 };
	static const double seeks_ms[] = { 8, 0.05, 0.05 };
	const unsigned int index = choice_of("profile", name, "hdd ssd nfs");

	options.bandwidth = bandwidths[index];
	options.seek_ms = seeks_ms[index];
	if (index == 2) {
		options.play = PLAY_NFS;
		options.targets = options.stripe_count = 1;
		options.cache = CACHE_BACK;
		options.latency_ms = 0.1;
		options.server_cache_bytes = 256 << 20;
		options.link = 1.25e9;
		options.mds_latency_ms = 0.3;
	}
}

static void add_pool(char *text)
{
	struct pool *pool = &options.pools[options.pool_count];
	char *list = strchr(text, '='), *save = NULL;

	if (!list || list == text || list - text >= POOL_NAME_BYTES ||
	    options.pool_count++ == MAX_POOLS)
		refuse("--pool %s: NAME=N,N,... with a name of at most 15 characters", text);
	memcpy(pool->name, text, (size_t)(list - text));
	for (char *word = strtok_r(list + 1, ",", &save); word; word = strtok_r(NULL, ",", &save)) {
		if (pool->count == MAX_TARGETS)
			refuse("--pool %s: too many targets", text);
		pool->targets[pool->count++] = (uint16_t)number_of("pool", word);
	}
	if (!pool->count)
		refuse("--pool %s: no targets", text);
}

static void add_used(const char *text)
{
	const char *bytes = strchr(text, '=');
	const long index = strtol(text, NULL, 10);

	if (!bytes || index < 0 || index >= MAX_TARGETS)
		refuse("--used %s: N=BYTES", text);
	options.used[index] = bytes_of("used", bytes + 1);
}

static void add_components(char *text)
{
	char *save = NULL;
	uint64_t start = 0;

	for (char *word = strtok_r(text, ",", &save); word; word = strtok_r(NULL, ",", &save)) {
		struct component *component =
			&options.progressive.components[options.progressive.count];
		char *inner = NULL;
		const char *end = strtok_r(word, ":", &inner), *count = strtok_r(NULL, ":", &inner);
		const char *size = strtok_r(NULL, ":", &inner);

		if (!end || !count || options.progressive.count++ == MAX_COMPONENTS)
			refuse("--progressive: END:COUNT[:SIZE],...");
		*component = (struct component){
			.start = start,
			.end = strcmp(end, "eof") == 0 ? UINT64_MAX : bytes_of("progressive", end),
			.first = UINT16_MAX,
			.stripe_size = size ? bytes_of("progressive", size) : 0,
			.on_mds = strcmp(count, "mdt") == 0,
		};
		if (strcmp(count, "-1") == 0)
			component->count = UINT16_MAX;
		else if (!component->on_mds)
			component->count = (uint16_t)number_of("progressive", count);
		start = component->end;
	}
	options.progressive.composite = true;
}

static bool yes(const char *name, const char *text)
{
	return choice_of(name, text, "no yes") == 1;
}

static const struct option long_options[] = {
	{ "profile", required_argument, NULL, 'a' },
	{ "play", required_argument, NULL, 'b' },
	{ "fsname", required_argument, NULL, 'c' },
	{ "backing", required_argument, NULL, 'd' },
	{ "memory", required_argument, NULL, 'e' },
	{ "prefault", required_argument, NULL, 'f' },
	{ "targets", required_argument, NULL, 'g' },
	{ "bandwidth", required_argument, NULL, 'i' },
	{ "seek-ms", required_argument, NULL, 'j' },
	{ "run", required_argument, NULL, 'k' },
	{ "latency-ms", required_argument, NULL, 'l' },
	{ "capacity", required_argument, NULL, 'm' },
	{ "total-capacity", required_argument, NULL, 'n' },
	{ "used", required_argument, NULL, 'o' },
	{ "pool", required_argument, NULL, 'p' },
	{ "server-cache", required_argument, NULL, 'q' },
	{ "link", required_argument, NULL, 'r' },
	{ "mds-latency-ms", required_argument, NULL, 's' },
	{ "mds-rate", required_argument, NULL, 't' },
	{ "stripe-size", required_argument, NULL, 'u' },
	{ "stripe-count", required_argument, NULL, 'v' },
	{ "progressive", required_argument, NULL, 'w' },
	{ "cache", required_argument, NULL, 'x' },
	{ "direct", required_argument, NULL, 'y' },
	{ "direct-alignment", required_argument, NULL, 'z' },
	{ "fallocate", required_argument, NULL, 'A' },
	{ "rename-flags", required_argument, NULL, 'B' },
	{ "max-write", required_argument, NULL, 'C' },
	{ "max-background", required_argument, NULL, 'D' },
	{ "dirty-percent", required_argument, NULL, 'E' },
	{ "window", required_argument, NULL, 'I' },
	{ "trap", required_argument, NULL, 'F' },
	{ "swap-bytes", no_argument, NULL, 'G' },
	{ "log", required_argument, NULL, 'H' },
	{ "help", no_argument, NULL, 'h' },
	{ NULL, 0, NULL, 0 },
};

/* What is a number or a path. */
static bool set_plain(int letter, const char *name, const char *value)
{
	switch (letter) {
	case 'c':
		options.fsname = value;
		break;
	case 'd':
		options.backing = value;
		break;
	case 'e':
		options.memory = bytes_of(name, value);
		break;
	case 'f':
		options.prefault = bytes_of(name, value);
		break;
	case 'g':
		options.targets = (unsigned int)number_of(name, value);
		break;
	case 'i':
		options.bandwidth = (double)bytes_of(name, value);
		break;
	case 'j':
		options.seek_ms = number_of(name, value);
		break;
	case 'k':
		options.run_bytes = bytes_of(name, value);
		break;
	case 'l':
		options.latency_ms = number_of(name, value);
		break;
	case 'm':
		options.capacity = bytes_of(name, value);
		break;
	case 'n':
		options.total_capacity = bytes_of(name, value);
		break;
	case 'q':
		options.server_cache_bytes = bytes_of(name, value);
		break;
	case 'r':
		options.link = (double)bytes_of(name, value);
		break;
	case 's':
		options.mds_latency_ms = number_of(name, value);
		break;
	case 't':
		options.mds_rate = number_of(name, value);
		break;
	case 'u':
		options.stripe_size = bytes_of(name, value);
		break;
	case 'z':
		options.direct_alignment = (unsigned int)number_of(name, value);
		break;
	case 'C':
		options.max_write = (unsigned int)bytes_of(name, value);
		break;
	case 'D':
		options.max_background = (unsigned int)number_of(name, value);
		break;
	case 'I':
		options.window = (unsigned int)number_of(name, value);
		break;
	case 'E':
		options.dirty_percent = (unsigned int)number_of(name, value);
		break;
	case 'H':
		options.log = value;
		break;
	default:
		return false;
	}
	return true;
}

static void set_other(int letter, const char *name, char *value)
{
	switch (letter) {
	case 'a':
		set_profile(value);
		break;
	case 'b':
		options.play = choice_of(name, value, "lustre beegfs ceph nfs");
		break;
	case 'o':
		add_used(value);
		break;
	case 'p':
		add_pool(value);
		break;
	case 'v':
		options.stripe_count = strcmp(value, "-1") == 0 ?
					       UINT16_MAX :
					       (unsigned int)number_of(name, value);
		break;
	case 'w':
		add_components(value);
		break;
	case 'x':
		options.cache = choice_of(name, value, "through back client");
		break;
	case 'y':
		options.direct = choice_of(name, value, "parallel threads serial none");
		break;
	case 'A':
		options.fallocate = yes(name, value);
		break;
	case 'B':
		options.rename_flags = yes(name, value);
		break;
	case 'F':
		options.traps |=
			1u << choice_of(name, value,
					"setstripe-ignored setxattr-ignored no-default no-layout "
					"pool-refused");
		break;
	case 'G':
		options.swap_bytes = true;
		break;
	case 'h':
		fputs(help, stdout);
		exit(0);
	default:
		refuse("what was said is not known");
	}
}

static void check(void)
{
	if (!options.backing)
		refuse("--backing is missing");
	if (!options.targets || options.targets > MAX_TARGETS)
		refuse("--targets: 1 to %d", MAX_TARGETS);
	if (options.bandwidth < 1)
		refuse("--bandwidth: more than 0");
	if (!options.stripe_size || options.stripe_size % CHUNK_BYTES)
		refuse("--stripe-size: a multiple of 64Ki");
	if (!options.stripe_count)
		refuse("--stripe-count: -1, or more than 0");
	if (options.max_write < PAGE || options.max_write > BLOCK_BYTES)
		refuse("--max-write: 4Ki to 1Mi");
	if (options.memory < BLOCK_BYTES || options.memory > UINT64_C(1) << 40)
		refuse("--memory: 1Mi to 1Ti");
	if (options.server_cache_bytes && options.server_cache_bytes < BLOCK_BYTES)
		refuse("--server-cache: at least 1Mi");
	for (unsigned int i = 0; i < options.pool_count; i++)
		for (unsigned int j = 0; j < options.pools[i].count; j++)
			if (options.pools[i].targets[j] >= options.targets)
				refuse("--pool %s: no such target", options.pools[i].name);
	for (unsigned int i = 0; i < options.targets; i++)
		if (options.used[i] > options.capacity)
			refuse("--used: target %u has not so much room", i);
	for (unsigned int i = 0; i < options.progressive.count; i++) {
		const struct component *component = &options.progressive.components[i];

		if (component->end <= component->start ||
		    component->end % CHUNK_BYTES !=
			    (component->end == UINT64_MAX ? CHUNK_BYTES - 1 : 0) ||
		    component->stripe_size % CHUNK_BYTES)
			refuse("--progressive: rising multiples of 64Ki");
	}
}

void options_parse(int count, char **arguments)
{
	int letter, index = 0;

	options = (struct options){
		.fsname = "stripefs",
		.targets = 8,
		.run_bytes = 16 << 20,
		.mds_latency_ms = 0.2,
		.mds_rate = 20000,
		.stripe_size = 1 << 20,
		.stripe_count = 1,
		.capacity = UINT64_C(64) << 30,
		.memory = UINT64_C(4) << 30,
		.max_background = 4096,
		.window = 8,
		.max_write = BLOCK_BYTES,
		.direct_alignment = PAGE,
		.fallocate = true,
		.rename_flags = true,
	};
	set_profile("hdd");
	while ((letter = getopt_long(count, arguments, "h", long_options, &index)) != -1) {
		if (letter == '?')
			exit(2);
		if (!set_plain(letter, long_options[index].name, optarg))
			set_other(letter, long_options[index].name, optarg);
	}
	if (optind + 1 != count)
		refuse("one mount point");
	options.mountpoint = arguments[optind];
	check();
}
