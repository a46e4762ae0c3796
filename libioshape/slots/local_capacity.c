/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How many may write: as the operator set it, as a job asks for it, or as it was learnt from what
 * holders report, which is added up here for learn.c. A report is what one holder wrote, and the
 * storage's time that it had for that: at each moment the time is divided among the slots in use.
 * So what all had together is the time in which anybody wrote, and a holder that goes on alone
 * after the others pays for all of it.
 */
#include "slots/local.h"

#include <string.h>

uint32_t local_capacity(const struct local_head *head)
{
	const uint32_t learnt = head->by_job ? 0 : learn_capacity(&head->learn);

	return MAX(head->set_capacity ? head->set_capacity : learnt ? learnt : head->capacity, 1u);
}

void local_learn_pass(struct local_table *table, const struct local_usage *usage)
{
	struct local_head *head = &table->image.head;

	/* Anybody may have written a time to come. */
	if (usage->used && head->parts_until_ns < table->now_ns)
		head->parts_ns += (table->now_ns - head->parts_until_ns) / usage->used;
	head->parts_until_ns = table->now_ns;
	if ((double)usage->used >= LEARN_FULL * local_capacity(head))
		head->full_ns = table->now_ns;
	local_changed(table, head);
}

void local_learn_anew(struct local_table *table)
{
	struct local_head *head = &table->image.head;

	head->wanted = 0;
	head->reports = head->reported = head->reported_ns = 0;
	head->capacity_ns = table->now_ns;
	local_changed(table, head);
}

static void learn(struct local_table *table)
{
	struct local_head *head = &table->image.head;
	const struct learn_epoch epoch = { (uint32_t)head->reports, head->wanted, head->reported,
					   (double)head->reported_ns / 1e9 };
	const uint32_t before = learn_capacity(&head->learn);

	learn_from(&head->learn, &epoch);
	head->wanted = 0;
	head->reports = head->reported = head->reported_ns = 0;
	if (learn_capacity(&head->learn) != before)
		local_learn_anew(table);
}

void local_learn_report(struct local_table *table, const struct local_member *member,
			uint64_t passed)
{
	struct local_head *head = &table->image.head;
	const uint64_t parts_ns = head->parts_ns - MIN(head->parts_ns, member->parts_ns);
	const struct local_usage usage = local_count(table);

	if (base_without("learning") || head->set_capacity || head->by_job || !member->given ||
	    passed < LEARN_LEAST_BYTES || member->since_ns < head->capacity_ns ||
	    head->full_ns <= member->since_ns)
		return;
	head->reports++;
	head->wanted = MAX(head->wanted, (uint32_t)MIN(usage.used + usage.waiters, LEARN_MOST));
	head->reported += MIN(passed, SLOTS_MOST_BYTES);
	head->reported_ns += parts_ns * member->given;
	if (head->reports >= learn_reports(&head->learn))
		learn(table);
	local_changed(table, head);
}

void local_choose_capacity(struct local_table *table, const struct slots_config *config,
			   const struct slots_request *request)
{
	struct local_head *head = &table->image.head;
	const uint32_t before = local_capacity(head);
	const uint32_t usual = request->default_capacity ? request->default_capacity :
							   config->default_capacity;

	head->by_job = config->asked_capacity > 0;
	head->capacity = head->by_job ? config->asked_capacity : usual;
	if (!head->by_job && (!head->learn.best || head->learn.start != MAX(usual, 1u)))
		learn_begin(&head->learn, usual);
	if (local_capacity(head) != before)
		local_learn_anew(table);
}
