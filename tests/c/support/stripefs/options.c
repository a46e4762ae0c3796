/* SPDX-License-Identifier: Apache-2.0 */
/* Parameters: profiles and command-line options. */
#include "stripefs.h"

#include <errno.h>
#include <getopt.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

struct options options;

static const char help[] =
	"Usage: stripefs [OPTION]... --backing FOLDER MOUNTPOINT...\n"
	"\n"
	"Mounts a filesystem that plays a parallel one: files are striped over storage targets, "
	"and every\n"
	"request takes the time that the model says. Runs until it is unmounted, or told to end "
	"by\n"
	"SIGTERM. Nothing survives that. tests/c/support/stripefs/README.md says what is "
	"modelled.\n"
	"Several mount points are several clients of the same storage.\n"
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
	"  --slow N               the model's time runs N times slower than the clock (1)\n"
	"\n"
	"Targets\n"
	"  --targets N            how many (8)\n"
	"  --bandwidth BYTES      of each, per second (60M)\n"
	"  --seek-ms MS           when a request does not go on where the last one ended (8)\n"
	"  --run BYTES            what the elevator serves in a row of one object (16Mi)\n"
	"  --latency-ms MS        of each request, besides (0)\n"
	"  --capacity BYTES       of each (64Gi)\n"
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
	"                         none (EINVAL); late (direct writes are accepted and lost, and "
	"fsync\n"
	"                         after them is EINVAL)\n"
	"  --fallocate yes|no     (yes)\n"
	"\n"
	"What the real one does\n"
	"  --trap NAME            may be said for several:\n"
	"                         setstripe-ignored: the setstripe ioctl says yes and does "
	"nothing\n"
	"                         setxattr-ignored: so does setxattr of a layout\n"
	"                         no-default: a directory without default has no lustre.lov\n"
	"                         no-layout: no layout is told at all\n"
	"                         pool-refused: an unknown pool is EINVAL, not ignored\n"
	"\n"
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

/*
 * Returns the index of a text in a list of names that are separated by spaces. Exits if it is not
 * in the list.
 */
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

static void set_profile(char *name)
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

static void add_used(char *text)
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

static void set_stripe_count(char *text)
{
	options.stripe_count = strcmp(text, "-1") == 0 ?
				       UINT16_MAX :
				       (unsigned int)number_of("stripe-count", text);
}

static void add_trap(char *text)
{
	options.traps |= 1u << choice_of("trap", text,
					 "setstripe-ignored setxattr-ignored no-default no-layout "
					 "pool-refused");
}

enum takes { TEXT, BYTES, RATE, NUMBER, COUNT, CHOICE, CALL };

/*
 * Command-line options and the fields that they set. A CHOICE is one of `names`, a RATE is bytes
 * per second as a double, and a CALL runs `call`.
 */
static const struct setting {
	const char *name;
	enum takes takes;
	void *field;
	const char *names;
	void (*call)(char *text);
} settings[] = {
	{ "profile", CALL, .call = set_profile },
	{ "play", CHOICE, .field = &options.play, .names = "lustre beegfs ceph nfs" },
	{ "fsname", TEXT, .field = &options.fsname },
	{ "backing", TEXT, .field = &options.backing },
	{ "memory", BYTES, .field = &options.memory },
	{ "slow", NUMBER, .field = &options.slow },
	{ "targets", COUNT, .field = &options.targets },
	{ "bandwidth", RATE, .field = &options.bandwidth },
	{ "seek-ms", NUMBER, .field = &options.seek_ms },
	{ "run", BYTES, .field = &options.run_bytes },
	{ "latency-ms", NUMBER, .field = &options.latency_ms },
	{ "capacity", BYTES, .field = &options.capacity },
	{ "used", CALL, .call = add_used },
	{ "pool", CALL, .call = add_pool },
	{ "server-cache", BYTES, .field = &options.server_cache_bytes },
	{ "link", RATE, .field = &options.link },
	{ "mds-latency-ms", NUMBER, .field = &options.mds_latency_ms },
	{ "mds-rate", NUMBER, .field = &options.mds_rate },
	{ "stripe-size", BYTES, .field = &options.stripe_size },
	{ "stripe-count", CALL, .call = set_stripe_count },
	{ "progressive", CALL, .call = add_components },
	{ "cache", CHOICE, .field = &options.cache, .names = "through back client" },
	{ "window", COUNT, .field = &options.window },
	{ "direct", CHOICE, .field = &options.direct,
	  .names = "parallel threads serial none late" },
	{ "fallocate", CHOICE, .field = &options.fallocate, .names = "no yes" },
	{ "trap", CALL, .call = add_trap },
};

#define SETTINGS (sizeof(settings) / sizeof(settings[0]))

static void set(const struct setting *setting, char *text)
{
	switch (setting->takes) {
	case TEXT:
		*(const char **)setting->field = text;
		break;
	case BYTES:
		*(uint64_t *)setting->field = bytes_of(setting->name, text);
		break;
	case RATE:
		*(double *)setting->field = (double)bytes_of(setting->name, text);
		break;
	case NUMBER:
		*(double *)setting->field = number_of(setting->name, text);
		break;
	case COUNT:
		*(unsigned int *)setting->field = (unsigned int)number_of(setting->name, text);
		break;
	case CHOICE:
		*(unsigned int *)setting->field = choice_of(setting->name, text, setting->names);
		break;
	case CALL:
		setting->call(text);
	}
}

static void check(void)
{
	if (!options.backing)
		refuse("--backing is missing");
	if (options.slow <= 0)
		refuse("--slow: more than 0");
	if (!options.targets || options.targets > MAX_TARGETS)
		refuse("--targets: 1 to %d", MAX_TARGETS);
	if (options.bandwidth < 1)
		refuse("--bandwidth: more than 0");
	if (!options.stripe_size || options.stripe_size % CHUNK_BYTES)
		refuse("--stripe-size: a multiple of 64Ki");
	if (!options.stripe_count)
		refuse("--stripe-count: -1, or more than 0");
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
	struct option known[SETTINGS + 2] = { { "help", no_argument, NULL, 0 } };
	int letter, index = 0;

	options = (struct options){
		.fsname = "stripefs",
		.slow = 1,
		.targets = 8,
		.run_bytes = 16 << 20,
		.mds_latency_ms = 0.2,
		.mds_rate = 20000,
		.stripe_size = 1 << 20,
		.stripe_count = 1,
		.capacity = UINT64_C(64) << 30,
		.memory = UINT64_C(4) << 30,
		.window = 8,
		.fallocate = true,
	};
	for (size_t i = 0; i < SETTINGS; i++)
		known[i + 1] = (struct option){
			.name = settings[i].name,
			.has_arg = required_argument,
		};
	set_profile((char[]){ "hdd" });
	while ((letter = getopt_long(count, arguments, "", known, &index)) != -1) {
		if (letter == '?')
			exit(2);
		if (index == 0) {
			fputs(help, stdout);
			exit(0);
		}
		set(&settings[index - 1], optarg);
	}
	if (optind == count || optind + MAX_MOUNTS < count)
		refuse("1 to %d mount points", MAX_MOUNTS);
	options.mountpoints = &arguments[optind];
	options.mount_count = (unsigned int)(count - optind);
	/*
	 * With a write-back cache the kernel trusts its own size of a file, so it would miss
	 * changes by other clients.
	 */
	if (options.mount_count > 1 && options.cache == CACHE_BACK)
		refuse("--cache back: one mount point");
	check();
}
