/* SPDX-License-Identifier: Apache-2.0 */
/* Two real ranks as two nodes, each with a tier of its own and copies of the other's files. */
#define _GNU_SOURCE
#include "group/group.h"
#include "support/tier_case.h"
#include "support/wires.h"
#include "tier/parity.h"

#include <ioshape/group.h>
#include <ioshape/tier.h>

#include <dirent.h>
#include <limits.h>
#include <sys/wait.h>

#define RANKS 2

/* valgrind crashes if io_uring maps its memory while another thread maps memory. */
static void setup(void)
{
	if (scratch_under_valgrind())
		ck_assert_int_eq(setenv("IOSHAPE_ENGINE", "threads", 1), 0);
	tier_setup();
	ck_assert_int_eq(mkdir(scratch_path("tier-1"), 0777), 0);
}

static struct test_case tests = { .name = "tiers of nodes",
				  .setup = setup,
				  .teardown = tier_teardown };

/* ---- Ranks ----------------------------------------------------------------------------------- */

struct scene {
	enum ioshape_parity parity;
	bool no_comm;
	bool one_tier; /* both nodes use the same folder */
	/* Messages fail from this one on; 0: none fails. */
	unsigned break_at;
};

struct rank {
	uint32_t rank;
	struct ioshape_context *context;
	struct ioshape_tier *tier;
	struct ioshape_group *group;
};

static struct wires wires;
static struct ioshape_comm breaking;
static unsigned sent, break_at;

static int send_until(void *user, uint32_t to, uint32_t tag, const void *data, size_t bytes,
		      uint32_t timeout_ms)
{
	return ++sent >= break_at ? -EPIPE :
				    wires.comm.send(user, to, tag, data, bytes, timeout_ms);
}

static const struct ioshape_comm *comm_of(const struct scene *scene, uint32_t rank)
{
	const struct ioshape_comm *comm = wires_be(&wires, rank);

	if (scene->no_comm)
		return NULL;
	if (!scene->break_at)
		return comm;
	sent = 0;
	break_at = scene->break_at;
	breaking = *comm;
	breaking.send = send_until;
	return &breaking;
}

static void open_rank(const struct scene *scene, struct rank *rank)
{
	struct ioshape_group_options options = IOSHAPE_GROUP_OPTIONS_INIT;

	options.rank = rank->rank;
	options.ranks = options.local_ranks = RANKS;
	options.token = scratch_directory();
	options.deadline_ms = 10000;
	options.node = rank->rank ? "another" : "one";
	options.tier = rank->tier;
	options.comm = comm_of(scene, rank->rank);
	ck_assert_msg(!ioshape_group_open(rank->context, there("run"), &options, &rank->group),
		      "%s", ioshape_last_error()->sentence);
}

static struct ioshape_tier *tier_of_scene(const struct scene *scene, struct ioshape_context *opened,
					  const char *folder)
{
	struct ioshape_tier_options options = IOSHAPE_TIER_OPTIONS_INIT;
	struct ioshape_tier *made;

	options.parity = scene->parity;
	ck_assert_int_eq(ioshape_tier_open(opened, scratch_path(folder), &options, &made), 0);
	return made;
}

static void start(const struct scene *scene, void (*body)(const struct rank *))
{
	struct rank rank = { .rank = 1 };

	rank.context = sample_context(IOSHAPE_ENGINE_AUTO, IOSHAPE_DIRECT_PREFER);
	rank.tier = tier_of_scene(scene, rank.context, scene->one_tier ? "tier" : "tier-1");
	open_rank(scene, &rank);
	body(&rank);
	ioshape_group_free(rank.group);
	wires_cut(&wires);
	ioshape_tier_free(rank.tier);
	ioshape_context_free(rank.context);
	scratch_leave_child(0);
}

static void run(const struct scene *scene, void (*body)(const struct rank *))
{
	struct rank rank = { .context = context, .tier = tier_of_scene(scene, context, "tier") };
	pid_t child;
	int status;

	ck_assert(wires_lay(&wires, 2));
	child = fork();
	ck_assert_int_ge(child, 0);
	if (!child)
		start(scene, body);
	open_rank(scene, &rank);
	body(&rank);
	ioshape_group_free(rank.group);
	ioshape_tier_free(rank.tier);
	wires_cut(&wires);
	ck_assert_int_eq(waitpid(child, &status, 0), child);
	ck_assert_int_eq(status, 0);
}

/* ---- Actions of ranks ------------------------------------------------------------------------ */

static struct ioshape_report save_step(const struct rank *rank, uint64_t step)
{
	const struct sample *saved = rank->rank ? &other : &sample;
	struct ioshape_save_options options = IOSHAPE_SAVE_OPTIONS_INIT;
	struct ioshape_report report = IOSHAPE_REPORT_INIT;

	options.report = &report;
	ck_assert_msg(!ioshape_group_save_tensors(rank->group, step, saved->tensors, saved->count,
						  &options, NULL),
		      "rank %u: %s", rank->rank, ioshape_last_error()->sentence);
	return report;
}

static void save_well(const struct rank *rank)
{
	ck_assert_uint_eq(save_step(rank, 1).downgrade_count, 0);
}

static void save_unprotected(const struct rank *rank)
{
	const struct ioshape_report report = save_step(rank, 1);

	ck_assert_uint_eq(report.downgrade_count, 1);
	ck_assert_int_eq(report.downgrades[0].code, IOSHAPE_DOWNGRADE_PARITY);
}

static const char *find(const struct rank *rank, bool intact, uint64_t *step)
{
	struct ioshape_search_options options = { .size = sizeof(options) };
	const char *directory = NULL;

	options.intact = intact;
	options.directory = &directory;
	*step = IOSHAPE_LATEST;
	return ioshape_group_get_latest(rank->group, &options, step) ? NULL : directory;
}

/* Returns the path of a file of step 1 on a node's tier. */
static const char *near(uint32_t node, const char *name)
{
	static char paths[4][2 * PATH_MAX];
	static unsigned next;
	char *path = paths[next++ % 4];

	snprintf(path, sizeof(*paths), "%s/ioshape-%u/files%s/step-0000000001/%s",
		 scratch_path(node ? "tier-1" : "tier"), (unsigned)geteuid(), there("run"), name);
	return path;
}

static void check_own_shard(const struct rank *rank, const char *directory)
{
	struct ioshape_checkpoint *checkpoint;
	struct ioshape_reader *reader;

	ck_assert_int_eq(ioshape_checkpoint_open(rank->context, directory, 1, &checkpoint), 0);
	ck_assert_msg(!ioshape_checkpoint_open_shard(checkpoint, rank->rank, NULL, &reader), "%s",
		      ioshape_last_error()->sentence);
	ck_assert_int_eq(ioshape_reader_verify(reader, 1), 0);
	ioshape_reader_free(reader);
	ioshape_checkpoint_free(checkpoint);
}

static void find_on_tiers(const struct rank *rank)
{
	for (int intact = 0; intact < 2; intact++) {
		uint64_t step;
		const char *directory = find(rank, intact, &step);

		ck_assert_msg(directory, "rank %u: %s", rank->rank, ioshape_last_error()->sentence);
		ck_assert_str_ne(directory, there("run"));
		ck_assert_uint_eq(step, 1);
		check_own_shard(rank, directory);
	}
}

static void find_nothing(const struct rank *rank)
{
	uint64_t step;

	ck_assert_ptr_null(find(rank, false, &step));
	ck_assert_int_eq(ioshape_last_error()->code, IOSHAPE_E_UNUSABLE);
	ck_assert_ptr_null(find(rank, true, &step));
}

/* ---- Files ----------------------------------------------------------------------------------- */

static bool is_there(const char *path)
{
	return !access(path, F_OK);
}

static uint8_t *read_all(const char *path, size_t *bytes)
{
	FILE *file = fopen(path, "rb");
	struct stat status;
	uint8_t *data;

	ck_assert_msg(file, "%s", path);
	ck_assert_int_eq(fstat(fileno(file), &status), 0);
	*bytes = (size_t)status.st_size;
	data = malloc(*bytes + 1);
	ck_assert_ptr_nonnull(data);
	ck_assert_uint_eq(fread(data, 1, *bytes, file), *bytes);
	fclose(file);
	return data;
}

/* Empties the node's tier, as if its disk was replaced. */
static void lose(uint32_t node)
{
	char command[2 * PATH_MAX];

	if (!node)
		ioshape_tier_free(tier);
	snprintf(command, sizeof(command), "rm -rf '%s'/*", scratch_path(node ? "tier-1" : "tier"));
	ck_assert_int_eq(system(command), 0);
	if (!node)
		tier = open_tier(0, 0);
}

static const struct scene partners = { .parity = IOSHAPE_PARITY_1_OF_2 };

/* ---- Tests ----------------------------------------------------------------------------------- */

TEST(tests, each_has_its_own_files_and_a_copy_of_the_partners)
{
	size_t bytes, parity_bytes;
	uint8_t *shard, *parity;

	run(&partners, save_well);
	for (uint32_t node = 0; node < RANKS; node++) {
		const char *own = node ? "rank-00001.pt" : "rank-00000.pt",
			   *others = node ? "rank-00000.pt" : "rank-00001.pt";

		ck_assert(is_there(near(node, own)) && !is_there(near(node, others)));
		shard = read_all(near(!node, others), &bytes);
		parity = read_all(near(node, node ? "node-00001.parity" : "node-00000.parity"),
				  &parity_bytes);
		ck_assert_uint_gt(parity_bytes, bytes);
		ck_assert_mem_eq(parity + 4096, shard, bytes);
		free(parity);
		free(shard);
	}
	ck_assert_uint_eq(scratch_entries(there("run")), 0);
	run(&partners, find_on_tiers);
}

TEST(tests, a_node_that_is_lost_gets_what_it_had)
{
	for (uint32_t lost = 0; lost < RANKS; lost++) {
		const char *name = lost ? "rank-00001.pt" : "rank-00000.pt";
		size_t bytes, restored_bytes;
		uint8_t *before, *restored;

		run(&partners, save_well);
		before = read_all(near(lost, name), &bytes);
		lose(lost);
		run(&partners, find_on_tiers);
		restored = read_all(near(lost, name), &restored_bytes);
		ck_assert_uint_eq(restored_bytes, bytes);
		ck_assert_mem_eq(restored, before, bytes);
		free(restored);
		free(before);
		/* The restored node protects the other one again. */
		lose(!lost);
		run(&partners, find_on_tiers);
	}
}

TEST(tests, without_parity_what_is_lost_is_lost)
{
	const struct scene scene = { .parity = IOSHAPE_PARITY_NONE };

	run(&scene, save_well);
	run(&scene, find_on_tiers);
	lose(1);
	run(&scene, find_nothing);
}

TEST(tests, without_a_way_for_bytes_the_report_says_so)
{
	const struct scene scene = { .parity = IOSHAPE_PARITY_1_OF_2, .no_comm = true };

	run(&scene, save_unprotected);
	run(&scene, find_on_tiers);
	lose(1);
	run(&scene, find_nothing);
}

TEST(tests, a_way_that_breaks_leaves_a_checkpoint_that_holds)
{
	struct scene scene = partners;

	for (scene.break_at = 1; scene.break_at <= 3; scene.break_at++) {
		run(&scene, scene.break_at < 3 ? save_unprotected : save_well);
		run(&partners, find_on_tiers);
		lose(0);
		lose(1);
	}
}

TEST(tests, a_copy_that_was_damaged_restores_nothing)
{
	run(&partners, save_well);
	flip(near(0, "node-00000.parity"), 4096 + LARGE / 2);
	lose(1);
	run(&partners, find_nothing);
	ck_assert(!is_there(near(1, "rank-00001.pt")));
}

/* ---- Contradictory records ------------------------------------------------------------------- */

/*
 * Writes a valid record of so many nodes on node 1, which has the files of both nodes. It names the
 * last node as the partner of node 0.
 */
static void forge(uint32_t nodes)
{
	uint32_t *order = calloc(nodes, sizeof(*order)), node_of_file[RANKS] = { 0, 1 };
	struct parity_record record = {
		.sets = { nodes, 1, 2, order },
		.file_count = RANKS,
		.node_of_file = node_of_file,
	};
	struct base_buffer text = { 0 };

	ck_assert_ptr_nonnull(order);
	for (uint32_t i = 1; i < nodes; i++)
		order[i] = nodes - i;
	ck_assert_int_eq(parity_record_encode(&text, &record), 0);
	scratch_write(near(1, "node-00000.parity"), text.data, text.bytes);
	base_buffer_free(&text);
	free(order);
}

/* Returns whether the node lists the forged file before its own. */
static bool is_forged_first(void)
{
	DIR *listing = opendir(near(1, ""));
	struct dirent *entry;
	bool first;

	ck_assert_ptr_nonnull(listing);
	do {
		entry = readdir(listing);
		ck_assert_ptr_nonnull(entry);
	} while (!strstr(entry->d_name, ".parity"));
	first = !strcmp(entry->d_name, "node-00000.parity");
	closedir(listing);
	return first;
}

/*
 * Rank 0 has lost its tier. Node 1's own record is right and allows a restore; the forged one does
 * not fit the job. The order of the two decides which one is used.
 */
LOOP_TEST(tests, a_node_whose_records_disagree_leads_nobody_astray, 0, 2)
{
	size_t bytes;
	uint8_t *shard, *own;

	run(&partners, save_well);
	shard = read_all(near(0, "rank-00000.pt"), &bytes);
	scratch_write(near(1, "rank-00000.pt"), shard, bytes);
	free(shard);
	lose(0);
	forge(1000);
	if (_i) { /* some filesystems list names in the order of creation */
		own = read_all(near(1, "node-00001.parity"), &bytes);
		ck_assert_int_eq(unlink(near(1, "node-00001.parity")), 0);
		scratch_write(near(1, "node-00001.parity"), own, bytes);
		free(own);
	}
	run(&partners, is_forged_first() ? find_nothing : find_on_tiers);
}

TEST(tests, nodes_on_one_tier_need_no_copies_of_each_other)
{
	const struct scene scene = { .parity = IOSHAPE_PARITY_1_OF_2, .one_tier = true };

	run(&scene, save_well);
	for (uint32_t node = 0; node < RANKS; node++) {
		ck_assert(is_there(near(0, node ? "rank-00001.pt" : "rank-00000.pt")));
		ck_assert(!is_there(near(0, node ? "node-00001.parity" : "node-00000.parity")));
	}
	run(&scene, find_on_tiers);
	ck_assert_int_eq(drain(), 0);
	ck_assert_uint_eq(scratch_entries(there("run/step-0000000001")), 3);
}

/* In the second round, a lost node is restored before the drain. */
LOOP_TEST(tests, files_of_both_are_in_place_when_both_are_drained, 0, 2)
{
	struct ioshape_tier *own = tier;

	run(&partners, save_well);
	ck_assert_int_eq(drain(), -EAGAIN);
	ck_assert_uint_eq(told.count[IOSHAPE_DRAINED_WAITS], 1);
	if (_i) {
		lose(1);
		run(&partners, find_on_tiers);
	}
	ck_assert(!is_there(there("run/step-0000000001")));
	ck_assert_int_eq(ioshape_tier_open(context, scratch_path("tier-1"), NULL, &tier), 0);
	ck_assert_int_eq(drain(), 0);
	ck_assert_uint_eq(told.count[IOSHAPE_DRAINED], 1);
	ioshape_tier_free(tier);
	tier = own;
	ck_assert_int_eq(drain(), 0);
	ck_assert_uint_eq(told.count[IOSHAPE_DRAINED], 1);
	ck_assert(is_there(there("run/step-0000000001/rank-00000.pt")));
	ck_assert(is_there(there("run/step-0000000001/rank-00001.pt")));
	ck_assert_uint_eq(scratch_entries(there("run")), 1);
	ck_assert_uint_eq(scratch_entries(there("run/step-0000000001")), 3);
}
