/* SPDX-License-Identifier: Apache-2.0 */
/* How many may write: as the operator set it, as a job asks for it, or by rule. */
#include "slots/local.h"

uint32_t local_capacity(const struct local_head *head)
{
	return MAX(head->set_capacity ? head->set_capacity : head->capacity, 1u);
}

void local_choose_capacity(struct local_table *table, const struct slots_config *config,
			   const struct slots_request *request)
{
	struct local_head *head = &table->image.head;

	head->by_job = config->asked_capacity > 0;
	head->capacity = head->by_job              ? config->asked_capacity :
			 request->default_capacity ? request->default_capacity :
						     config->default_capacity;
	local_changed(table, head);
}
