/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Compares what a save writes with the checkpoint before it, and judges the difference by rules.
 * Training that goes wrong often writes files that are valid and useless: of NaN, of a copy that
 * never changes, or of tensors that were overwritten.
 *
 * The comparison needs only the checksums of records, which writing computes anyway, and the
 * statistics of tensors. Both are in the file. So a restarted job compares its first save with the
 * checkpoint that it loaded.
 */
#include "save/file.h"

#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Size from which a record is large. Small records (step counters, states of random generators)
 * change even if all tensors stand still. */
#define LARGE_BYTES (1 * MIB)
/* In a file without such records, those of at least half the largest size count as large, but never
 * below this limit. */
#define LEAST_LARGE_BYTES (16 * KIB)
/* Size of the state of torch's generator on the CPU. */
#define GENERATOR_BYTES 5056
/* A float tensor of so many numbers that changes shows that training goes on, though all large
 * tensors may be frozen. */
#define LEAST_TRAINED_NUMBERS 64
/* Factor by which a norm changes at least if it jumps. */
#define JUMP 10.0

/* ---- The setting ----------------------------------------------------------------------------- */

static const char *const rules[SAVE_RULES] = { "nonfinite", "unchanged", "constant", "jump" };
static const char *const actions[] = { "warn", "fail", "off" };

/* Finds a word that ends at `bytes` in a list. Returns `count` if it is not there. */
static size_t find_word(const char *const *words, size_t count, const char *word, size_t bytes)
{
	size_t i = 0;

	while (i < count && (strlen(words[i]) != bytes || memcmp(words[i], word, bytes) != 0))
		i++;
	return i;
}

/* Takes "RULE=ACTION". Returns false if it is something else. */
static bool take_rule(uint8_t chosen[SAVE_RULES], const char *text, size_t bytes)
{
	const char *sign = memchr(text, '=', bytes);
	size_t rule, action;

	if (!sign)
		return false;
	rule = find_word(rules, SAVE_RULES, text, (size_t)(sign - text));
	action = find_word(actions, ARRAY_LENGTH(actions), sign + 1,
			   bytes - (size_t)(sign + 1 - text));
	if (rule == SAVE_RULES || action == ARRAY_LENGTH(actions))
		return false;
	chosen[rule] = (uint8_t)action;
	return true;
}

int save_examine_parse(uint8_t chosen[SAVE_RULES], const char *text, struct base_error *error)
{
	const size_t all = text ? find_word(actions, ARRAY_LENGTH(actions), text, strlen(text)) :
				  SAVE_WARN;

	memset(chosen, SAVE_WARN, SAVE_RULES);
	chosen[SAVE_JUMP] = SAVE_OFF;
	if (all < ARRAY_LENGTH(actions)) {
		memset(chosen, (int)all, SAVE_JUMP);
		return 0;
	}
	for (size_t bytes; *text; text += bytes + (text[bytes] == ',')) {
		bytes = strcspn(text, ",");
		if (!take_rule(chosen, text, bytes))
			return base_fail_reason_with(
				error, -EINVAL,
				"it takes warn, fail, off, or such as nonfinite=fail,constant=off",
				"\"%.*s\" is not a rule and its action", (int)MIN(bytes, 64), text);
	}
	return 0;
}

/* ---- Facts remembered of a file -------------------------------------------------------------- */

struct large_record {
	uint64_t bytes;
	uint32_t crc32;
};

/* A record that was examined and has more than one number. */
struct seen_tensor {
	uint64_t key; /* hash of the tensor's name, if known, and of its dtype */
	uint64_t bytes;
	uint64_t record; /* position in the file */
	double sum_squares;
	uint32_t crc32;
	uint8_t group;
	bool large;
	bool moved;     /* it changed in an earlier comparison */
	bool nonfinite; /* it has NaN or infinities */
	bool constant;
};

struct save_seen {
	TAILQ_ENTRY(save_seen) entry;
	char *path;       /* absolute path */
	uint64_t number;  /* order in which files were remembered */
	uint64_t content; /* hash of all records that training changes */
	bool stale;       /* it raised the alarm `unchanged` */
	bool shared;      /* `content` may include what other processes save */
	uint64_t bytes;   /* size of all large records */
	size_t count;
	struct large_record *records; /* sorted by size and checksum */
	size_t tensor_count;
	struct seen_tensor *tensors; /* sorted by key, size and position */
};

/* Facts about the records of a file. */
struct facts {
	const struct format_entry *entries;
	uint64_t count;
	uint64_t own; /* leading records that are not tensors */
	const struct format_index *index;
	const struct save_record *records; /* NULL: the file was loaded */
};

/* Returns whether a record is a tensor or may be one. The pickle has numbers and other objects. */
static bool may_be_tensor(const struct facts *facts, uint64_t i)
{
	const char *name = facts->entries[i].name;
	const char *slash = strrchr(name, '/');

	return i >= facts->own && strcmp(slash ? slash + 1 : name, "data.pkl") != 0;
}

/* Returns whether a record differs between two files only if training went on between them. The
 * state of torch's generator does not count: evaluating draws numbers, too. */
static bool shows_training(const struct format_entry *entry)
{
	static const char *const constant[] = { "version", "byteorder", ".format_version",
						".storage_alignment", "serialization_id" };
	const char *slash = strrchr(entry->name, '/');
	const char *name = slash ? slash + 1 : entry->name;

	return entry->bytes != GENERATOR_BYTES && find_word(constant, ARRAY_LENGTH(constant), name,
							    strlen(name)) == ARRAY_LENGTH(constant);
}

static uint64_t least_large_bytes(const struct facts *facts)
{
	uint64_t most = 0;

	for (uint64_t i = 0; i < facts->count; i++)
		if (may_be_tensor(facts, i))
			most = MAX(most, facts->entries[i].bytes);
	return MIN(MAX(most / 2, LEAST_LARGE_BYTES), LARGE_BYTES);
}

static int compare_records(const void *one, const void *other)
{
	const struct large_record *a = one, *b = other;

	if (a->bytes != b->bytes)
		return a->bytes < b->bytes ? -1 : 1;
	return (a->crc32 > b->crc32) - (a->crc32 < b->crc32);
}

/* Compares the classes of two tensors: those of one class cannot be told apart. */
static int compare_classes(const struct seen_tensor *a, const struct seen_tensor *b)
{
	if (a->key != b->key)
		return a->key < b->key ? -1 : 1;
	return (a->bytes > b->bytes) - (a->bytes < b->bytes);
}

static int compare_tensors(const void *one, const void *other)
{
	const struct seen_tensor *a = one, *b = other;
	const int order = compare_classes(a, b);

	return order ? order : (a->record > b->record) - (a->record < b->record);
}

static void free_seen(struct save_seen *seen)
{
	if (!seen)
		return;
	free(seen->path);
	free(seen->records);
	free(seen->tensors);
	free(seen);
}

static void add_tensor(struct save_seen *seen, const struct facts *facts, uint64_t i, bool large,
		       const char *name)
{
	const struct format_examined *examined = &facts->index->examined[i];
	const struct base_statistics *statistics = &examined->statistics;

	if (!statistics->dtype || statistics->count < 2)
		return;
	/* A number that is wrong since an earlier save stays wrong until it is repaired. So it
	 * counts as right in the checkpoint before. */
	seen->tensors[seen->tensor_count++] = (struct seen_tensor){
		.key = base_hash_text(name) + statistics->dtype,
		.bytes = facts->entries[i].bytes,
		.record = i,
		.sum_squares = statistics->sum_squares,
		.crc32 = facts->entries[i].crc32,
		.group = facts->records ? facts->records[i].group : 0,
		.large = large,
		.nonfinite = statistics->nans + statistics->infinities &&
			     !(examined->alarms & IOSHAPE_ALARM_NONFINITE),
		.constant = base_statistics_constant(statistics) &&
			    !(examined->alarms & IOSHAPE_ALARM_CONSTANT),
	};
}

static uint64_t hash_record(const struct format_entry *entry)
{
	return (entry->bytes << 32 ^ entry->crc32) * 0x9e3779b97f4a7c15;
}

/* Collects the large records and the examined tensors. */
static void collect(struct save_seen *seen, const struct facts *facts)
{
	const uint64_t least = least_large_bytes(facts);
	const struct format_index *index = facts->index;
	uint64_t row = 0;

	for (uint64_t i = 0; i < facts->count; i++) {
		const bool large = facts->entries[i].bytes >= least;
		const char *name = "";

		/* Positions do not matter, so the records' hashes are summed. */
		if (shows_training(&facts->entries[i]))
			seen->content += hash_record(&facts->entries[i]);
		while (index && row < index->tensor_count && index->tensors[row].record < i)
			row++;
		if (!may_be_tensor(facts, i))
			continue;
		if (index && row < index->tensor_count && index->tensors[row].record == i)
			name = index->tensors[row].name;
		if (index && index->has_statistics)
			add_tensor(seen, facts, i, large, name);
		if (!large)
			continue;
		seen->records[seen->count].bytes = facts->entries[i].bytes;
		seen->records[seen->count++].crc32 = facts->entries[i].crc32;
		seen->bytes += facts->entries[i].bytes;
	}
	qsort(seen->records, seen->count, sizeof(*seen->records), compare_records);
	qsort(seen->tensors, seen->tensor_count, sizeof(*seen->tensors), compare_tensors);
}

/* Returns the facts to remember of a file, still without its path. NULL: there are none, or no
 * memory. That makes no save or load fail. */
static struct save_seen *look(const struct facts *facts)
{
	struct save_seen *seen = calloc(1, sizeof(*seen));
	const size_t size = MAX(facts->count, 1);

	if (!seen)
		return NULL;
	seen->records = reallocarray(NULL, size, sizeof(*seen->records));
	seen->tensors = reallocarray(NULL, size, sizeof(*seen->tensors));
	if (seen->records && seen->tensors)
		collect(seen, facts);
	if (seen->count || seen->tensor_count)
		return seen;
	free_seen(seen);
	return NULL;
}

/* Returns the size of the records that both files have. Positions do not matter, because a new
 * tensor renumbers all tensors behind it. */
static uint64_t bytes_in_both(const struct save_seen *one, const struct save_seen *other)
{
	size_t i = 0, j = 0;
	uint64_t bytes = 0;

	while (i < one->count && j < other->count) {
		int order = compare_records(&one->records[i], &other->records[j]);

		if (!order)
			bytes += one->records[i].bytes;
		i += order <= 0;
		j += order >= 0;
	}
	return bytes;
}

/* ---- Checkpoint families --------------------------------------------------------------------- */

/* Returns whether two paths belong to one checkpoint family: they differ at most in their
 * numbers. */
static bool is_same_family(const char *one, const char *other)
{
	for (;; one++, other++) {
		while (isdigit((unsigned char)*one))
			one++;
		while (isdigit((unsigned char)*other))
			other++;
		if (*one != *other)
			return false;
		if (!*one)
			return true;
	}
}

static struct save_seen *find(const struct save_seen_list *list, const char *path)
{
	struct save_seen *seen = TAILQ_FIRST(&list->all);

	while (seen && !is_same_family(seen->path, path))
		seen = TAILQ_NEXT(seen, entry);
	return seen;
}

static void forget(struct save_seen_list *list, struct save_seen *seen)
{
	TAILQ_REMOVE(&list->all, seen, entry);
	list->count--;
	free_seen(seen);
}

/* Adds a file to the list, and removes the previous one of its family. If the list is full, removes
 * the oldest instead. */
static void remember(struct ioshape_context *context, struct save_seen_list *list,
		     struct save_seen *seen)
{
	struct save_seen *old = find(list, seen->path);

	if (!old && list->count == SAVE_KEPT_FAMILIES)
		for (old = TAILQ_FIRST(&list->all); TAILQ_NEXT(old, entry);)
			old = TAILQ_NEXT(old, entry);
	if (old)
		forget(list, old);
	seen->number = ++context->seen_count;
	TAILQ_INSERT_HEAD(&list->all, seen, entry);
	list->count++;
}

void save_seen_forget(struct ioshape_context *context)
{
	while (context->saved.count)
		forget(&context->saved, TAILQ_FIRST(&context->saved.all));
	while (context->loaded.count)
		forget(&context->loaded, TAILQ_FIRST(&context->loaded.all));
}

/* ---- Judging tensors ------------------------------------------------------------------------- */

/* The result of a rule. */
struct finding {
	uint64_t tensors; /* number of tensors; 0: nothing */
	bool about_one;   /* the sentence begins with the first tensor, which is in `record` */
	uint64_t record;
	char sentence[768]; /* a path, and some words and numbers */
};

/* A save in the comparison with the checkpoint before it. */
struct judging {
	struct save_compare *compare;
	const struct save_plan *plan;
	const struct save_seen *before;
	struct finding findings[SAVE_RULES];
	bool trains;   /* see LEAST_TRAINED_NUMBERS */
	bool repeated; /* the save repeats the one before; see is_repeated() */
	/* Groups of tensors by their number, and the whole file as group 0. */
	struct {
		uint64_t bytes; /* size of the group's tensors that stand still */
		bool moves;
		/* Path of the file with equal tensors, if they should move; NULL: they need not. */
		const char *before;
	} groups[256];
};

static bool is_float(uint32_t dtype)
{
	return (dtype >= IOSHAPE_FLOAT16 && dtype <= IOSHAPE_COMPLEX128) ||
	       dtype == IOSHAPE_BFLOAT16 || dtype >= IOSHAPE_FLOAT8_E4M3FN;
}

/* Returns the finding that a sentence must be written to; NULL: the rule is off, or it has one. */
static struct finding *find_in(struct judging *judging, enum save_rule rule, uint64_t record)
{
	struct finding *finding = &judging->findings[rule];

	if (judging->compare->context->examine[rule] == SAVE_OFF)
		return NULL;
	judging->plan->examined[record].alarms |= 1u << rule;
	if (finding->tensors++)
		return NULL;
	finding->about_one = true;
	finding->record = record;
	return finding;
}

#define SAY(finding, ...) snprintf((finding)->sentence, sizeof((finding)->sentence), __VA_ARGS__)

static void judge_nonfinite(struct judging *judging, const struct seen_tensor *now,
			    const struct seen_tensor *before)
{
	const struct base_statistics *statistics = &judging->plan->examined[now->record].statistics;
	struct finding *finding;

	if (!now->nonfinite || before->nonfinite)
		return;
	finding = find_in(judging, SAVE_NONFINITE, now->record);
	if (finding)
		SAY(finding,
		    "has %" PRIu64 " NaN and %" PRIu64 " infinities, and had none in \"%s\"",
		    statistics->nans, statistics->infinities, judging->before->path);
}

static void judge_constant(struct judging *judging, const struct seen_tensor *now,
			   const struct seen_tensor *before)
{
	const struct base_statistics *statistics = &judging->plan->examined[now->record].statistics;
	struct finding *finding;

	if (!now->constant || before->constant || !now->large || !is_float(statistics->dtype))
		return;
	finding = find_in(judging, SAVE_CONSTANT, now->record);
	if (finding)
		SAY(finding, "has %" PRIu64 " numbers that are all %g, and that differed in \"%s\"",
		    statistics->count, statistics->minimum, judging->before->path);
}

static void judge_jump(struct judging *judging, const struct seen_tensor *now,
		       const struct seen_tensor *before)
{
	const uint32_t dtype = judging->plan->examined[now->record].statistics.dtype;
	const double squares = now->sum_squares, squares_before = before->sum_squares;
	struct finding *finding;

	if (!now->large || !is_float(dtype) || squares_before == 0 ||
	    (squares <= squares_before * JUMP * JUMP && squares * JUMP * JUMP >= squares_before))
		return;
	finding = find_in(judging, SAVE_JUMP, now->record);
	if (finding)
		SAY(finding, "has squares that add up to %g, and that added up to %g in \"%s\"",
		    squares, squares_before, judging->before->path);
}

/* Returns whether a file is saved again to one path while no training goes on: a state that is only
 * evaluated stands still for a good reason. A stale file stays stale. */
static bool is_repeated(const struct save_seen *now, const struct save_seen *before)
{
	return (now->content == before->content || before->shared) && !before->stale &&
	       !strcmp(now->path, before->path);
}

/* Judges the tensors of one class. They can be matched if there are as many as before. */
static void judge_class(struct judging *judging, struct seen_tensor *now, size_t count,
			const struct seen_tensor *before, size_t count_before)
{
	for (size_t i = 0; i < count; i++) {
		const struct base_statistics *statistics =
			&judging->plan->examined[now[i].record].statistics;
		const bool matched = count == count_before;
		const bool equal = matched && now[i].crc32 == before[i].crc32;

		if (!equal) {
			judging->groups[now[i].group].moves |= now[i].group > 0;
			judging->trains |= is_float(statistics->dtype) &&
					   statistics->count >= LEAST_TRAINED_NUMBERS;
		}
		if (!matched)
			continue;
		now[i].moved = before[i].moved || !equal;
		if (equal && now[i].large && now[i].group) {
			judging->groups[now[i].group].bytes += now[i].bytes;
			if (before[i].moved && !judging->repeated)
				judging->groups[now[i].group].before = judging->before->path;
		}
		judge_nonfinite(judging, &now[i], &before[i]);
		judge_constant(judging, &now[i], &before[i]);
		judge_jump(judging, &now[i], &before[i]);
		/* See add_tensor(). */
		if (judging->plan->examined[now[i].record].alarms & IOSHAPE_ALARM_NONFINITE)
			now[i].nonfinite = false;
		if (judging->plan->examined[now[i].record].alarms & IOSHAPE_ALARM_CONSTANT)
			now[i].constant = false;
	}
}

static size_t class_size(const struct save_seen *seen, size_t from, const struct seen_tensor *class)
{
	size_t i = from;

	while (i < seen->tensor_count && !compare_classes(&seen->tensors[i], class))
		i++;
	return i - from;
}

static void judge_tensors(struct judging *judging)
{
	const struct save_seen *before = judging->before;
	struct save_seen *now = judging->compare->seen;
	size_t i = 0, j = 0, size, size_before;

	for (; i < now->tensor_count; i += size, j += size_before) {
		struct seen_tensor *class = &now->tensors[i];

		while (j < before->tensor_count && compare_classes(&before->tensors[j], class) < 0)
			j++;
		size = class_size(now, i, class);
		size_before = class_size(before, j, class);
		judge_class(judging, class, size, &before->tensors[j], size_before);
	}
}

/* ---- Judging whole files --------------------------------------------------------------------- */

/* Writes that all tensors of a group stand still. */
static void say_still(struct finding *finding, size_t group, const char *size, const char *before)
{
	finding->tensors = 1;
	if (!group)
		SAY(finding, "all its large tensors%s are identical to those of \"%s\"", size,
		    before);
	else
		SAY(finding,
		    "all tensors of %s%s are identical to those of \"%s\", although they changed "
		    "earlier",
		    group == 1 ? "the model" :
		    group == 2 ? "the optimizer" :
				 BASE_WORDS("group %zu", group),
		    size, before);
}

/* Compares the large records with those of an earlier file. Returns whether all are identical. */
static bool judge_unchanged(struct judging *judging, const struct save_seen *before)
{
	struct save_compare *compare = judging->compare;
	const struct save_seen *seen = compare->seen;
	uint64_t same;

	if (!before || !seen->bytes)
		return false;
	same = bytes_in_both(seen, before);
	compare->compared_bytes = seen->bytes;
	compare->unchanged_bytes = MAX(compare->unchanged_bytes, same);
	if (same != seen->bytes)
		return false;
	judging->groups[0].bytes = seen->bytes;
	if (!is_repeated(seen, before) && !judging->groups[0].before)
		judging->groups[0].before = before->path;
	return true;
}

/* Looks for groups of tensors that stand still. The first one is the finding, unless the tensors of
 * other processes decide, too. */
static void judge_groups(struct judging *judging)
{
	struct save_standstill *standstill = &judging->compare->standstill;
	struct finding *finding = &judging->findings[SAVE_UNCHANGED];

	standstill->moves = 0;
	for (size_t group = 0; group < ARRAY_LENGTH(judging->groups); group++) {
		const uint32_t bit = group < 32 ? UINT32_C(1) << group : 0;
		const char *before = judging->groups[group].before;

		if (judging->groups[group].moves) {
			standstill->moves |= bit;
			continue;
		}
		if (!before)
			continue;
		standstill->still |= bit;
		if (judging->compare->seen->stale)
			continue;
		judging->compare->seen->stale = true;
		snprintf(standstill->before, sizeof(standstill->before), "%s", before);
		if (!judging->compare->shared)
			say_still(finding, group,
				  BASE_WORDS(" (%s)", BASE_SIZE(judging->groups[group].bytes)),
				  before);
	}
}

/* Compares the save with all files of its family, and its tensors with the newest one. */
static void judge(struct judging *judging)
{
	struct ioshape_context *context = judging->compare->context;
	const char *path = judging->compare->seen->path;
	const struct save_seen *saved = find(&context->saved, path);
	const struct save_seen *loaded = find(&context->loaded, path);
	const struct save_seen *newest =
		saved && (!loaded || loaded->number < saved->number) ? saved : loaded;
	const struct save_compare *other;
	bool identical = false;

	/* Saves under way are newer, and the newest is the first. */
	TAILQ_FOREACH(other, &context->compared, entry)
	if (!judging->before && is_same_family(other->seen->path, path))
		judging->before = other->seen;
	if (!judging->before)
		judging->before = newest;
	if (!judging->before)
		return;
	judging->repeated = is_repeated(judging->compare->seen, judging->before);
	judge_tensors(judging);
	if (context->examine[SAVE_UNCHANGED] == SAVE_OFF)
		return;
	TAILQ_FOREACH(other, &context->compared, entry)
	if (is_same_family(other->seen->path, path))
		identical |= judge_unchanged(judging, other->seen);
	identical |= judge_unchanged(judging, saved);
	identical |= judge_unchanged(judging, loaded);
	judging->groups[0].moves = judging->trains || (judging->compare->seen->bytes && !identical);
	judge_groups(judging);
}

/* ---- The verdict ----------------------------------------------------------------------------- */

static const char *const remedies[SAVE_RULES] = {
	"continue from an earlier checkpoint, or set examine=nonfinite=off",
	"save what training updates, not an old copy of it, or set examine=unchanged=off",
	"find out what overwrote it, or set examine=constant=off",
	"continue from an earlier checkpoint, or set examine=jump=off",
};

#define TENSOR_NAME_BYTES 512

/* Writes the name of a tensor as messages show it. The caller's function may wait for other threads
 * of the program, so the caller of this function holds no lock. */
static void name_tensor(const struct save_plan *plan, uint64_t record,
			char shown[FORMAT_SHOWN_NAME_BYTES])
{
	const char *of_record = plan->records[record].name;
	char name[TENSOR_NAME_BYTES] = "";

	if (plan->tensors && record >= plan->own)
		of_record = plan->tensors[record - plan->own].name;
	else if (plan->tensor_name)
		plan->tensor_name(plan->tensor_name_user, of_record, name, sizeof(name));
	name[sizeof(name) - 1] = '\0';
	format_show_name(shown, *name ? name : of_record, strlen(*name ? name : of_record));
}

/* Adds what a rule found to the report, and then to the log or to *error. */
static int tell(struct judging *judging, enum save_rule rule, struct base_error *error)
{
	struct save_compare *compare = judging->compare;
	const struct ioshape_context *context = compare->context;
	const bool fails = context->examine[rule] == SAVE_FAIL;
	const struct finding *finding = &judging->findings[rule];
	char name[FORMAT_SHOWN_NAME_BYTES], sentence[BASE_ERROR_TEXT_BYTES], more[64] = "";
	struct base_error alarm = { 0 };

	if (finding->about_one)
		name_tensor(judging->plan, finding->record, name);
	if (finding->tensors > 1)
		snprintf(more, sizeof(more), " (and %" PRIu64 " more tensors)",
			 finding->tensors - 1);
	if (finding->about_one)
		snprintf(sentence, sizeof(sentence), "tensor \"%s\" %s%s", name, finding->sentence,
			 more);
	else
		snprintf(sentence, sizeof(sentence), "%s", finding->sentence);
	if (!compare->alarms)
		snprintf(compare->alarm, sizeof(compare->alarm), "%.*s",
			 (int)sizeof(compare->alarm) - 1, sentence);
	compare->alarms |= 1u << rule;
	base_fail_reason_with(&alarm, IOSHAPE_E_ALARM, remedies[rule], "%s \"%s\": %s",
			      fails ? "cannot save" : "saving", compare->path, sentence);
	if (!fails) {
		base_log(&context->log, IOSHAPE_LOG_WARNING, "%s", alarm.text);
		return 0;
	}
	if (finding->about_one)
		base_error_in_record(&alarm, name);
	return base_propagate(error, &alarm);
}

int save_examine(struct save_compare *compare, const struct save_plan *plan,
		 const struct format_entry *entries, struct base_error *error)
{
	struct ioshape_context *context = compare->context;
	const struct facts facts = { entries, plan->count, plan->own, &plan->index, plan->records };
	struct judging judging = { .compare = compare, .plan = plan };
	bool fails = false;
	int ret = 0;

	/* A save whose digest was computed has been judged already. */
	if (!context->examines || compare->seen)
		return 0;
	compare->seen = look(&facts);
	if (compare->seen)
		compare->seen->path = strdup(compare->path);
	if (!compare->seen || !compare->seen->path) {
		free_seen(compare->seen);
		compare->seen = NULL;
		return 0;
	}
	compare->standstill.moves = UINT32_MAX; /* nothing to compare with, or the rule is off */
	pthread_mutex_lock(&context->lock);
	judge(&judging);
	for (enum save_rule rule = 0; rule < SAVE_RULES; rule++)
		fails |= judging.findings[rule].tensors && context->examine[rule] == SAVE_FAIL;
	/* No save may be compared with one that fails. */
	if (!fails)
		TAILQ_INSERT_HEAD(&context->compared, compare, entry);
	pthread_mutex_unlock(&context->lock);
	for (enum save_rule rule = 0; rule < SAVE_RULES; rule++)
		if (judging.findings[rule].tensors && !ret)
			ret = tell(&judging, rule, error);
	if (fails) {
		free_seen(compare->seen);
		compare->seen = NULL;
	}
	return ret;
}

int save_examine_standstill(struct save_compare *compare, const struct save_standstill *standstill,
			    struct base_error *error)
{
	struct judging judging = { .compare = compare };
	const uint32_t still = standstill->still & ~standstill->moves;

	if (!still || compare->context->examine[SAVE_UNCHANGED] == SAVE_OFF)
		return 0;
	say_still(&judging.findings[SAVE_UNCHANGED], (size_t)__builtin_ctz(still), "",
		  standstill->before);
	return tell(&judging, SAVE_UNCHANGED, error);
}

void save_compare_end(struct save_compare *compare, bool committed, struct ioshape_report *report)
{
	struct ioshape_context *context = compare->context;

	report->alarms = compare->alarms;
	memcpy(report->alarm, compare->alarm, sizeof(report->alarm));
	if (compare->alarms)
		save_count_alarms(context, compare->path, compare->alarms);
	if (compare->compared_bytes)
		base_log(&context->log, IOSHAPE_LOG_DEBUG,
			 "%s: %" PRIu64 " of %" PRIu64
			 " bytes of large tensors are unchanged since the previous save",
			 compare->path, compare->unchanged_bytes, compare->compared_bytes);
	if (!compare->seen)
		return;
	pthread_mutex_lock(&context->lock);
	TAILQ_REMOVE(&context->compared, compare, entry);
	if (committed)
		remember(context, &context->saved, compare->seen);
	else
		free_seen(compare->seen);
	pthread_mutex_unlock(&context->lock);
	compare->seen = NULL;
}

/* ---- Remembering a load ---------------------------------------------------------------------- */

void save_compare_loaded(struct ioshape_context *context, const char *path,
			 const struct format_entry *entries, uint64_t count,
			 const struct format_index *index, bool shared)
{
	const struct facts facts = { entries, count, 0, index, NULL };
	struct save_seen *seen;

	if (!context->examines || !count)
		return;
	seen = look(&facts);
	if (seen && facts.index)
		seen->stale = facts.index->alarms & IOSHAPE_ALARM_UNCHANGED;
	if (seen)
		seen->shared = shared;
	if (!seen || save_absolute_path(path, &seen->path, NULL)) {
		free_seen(seen);
		return;
	}
	pthread_mutex_lock(&context->lock);
	remember(context, &context->loaded, seen);
	pthread_mutex_unlock(&context->lock);
}
