/* SPDX-License-Identifier: Apache-2.0 */
/* The words of a refusal: names, remedies, and the text that a person reads. */
#include <stdarg.h>
#include <stdio.h>

#include "judge.h"

/* Leaves room in a text for the longest type, numbers and remedy, so that the remedy is never cut off. */
#define CAUSE_SIZE 200

static const char *const names[] = {
#define X(id, name, remedy) [id] = (name),
        KVS_REFUSAL_TABLE(X)
#undef X
};

static const char *const remedies[] = {
#define X(id, name, remedy) [id] = (remedy),
        KVS_REFUSAL_TABLE(X)
#undef X
};

const char *kvs_refusal_name(enum kvs_refusal refusal)
{
	return (unsigned int)refusal < KVS_REFUSAL_COUNT ? names[refusal] : "unknown";
}

const char *kvs_refusal_remedy(enum kvs_refusal refusal)
{
	return (unsigned int)refusal < KVS_REFUSAL_COUNT ? remedies[refusal] : "";
}

bool kvs_case_refuse(struct kvs_case *c, enum kvs_refusal refusal, const char *format, ...)
{
	struct kvs_verdict *verdict = c->verdict;
	char lengths[64] = "";
	char cause[CAUSE_SIZE];
	va_list args;

	va_start(args, format);
	if (vsnprintf(cause, sizeof(cause), format, args) < 0)
		cause[0] = '\0';
	va_end(args);
	if (c->src)
		(void)snprintf(lengths, sizeof(lengths), ", item lengths %llu and %llu",
		               (unsigned long long)c->src_length, (unsigned long long)c->dst_length);
	verdict->action = KVS_ACT_REFUSE;
	verdict->refusal = refusal;
	kvs_text_set(&verdict->text, "cannot splice %s (prefill_tp_size=%u, decode_tp_size=%u%s): %s; %s",
	             c->src ? c->src->type : "this component", c->prefill ? c->prefill->tp_size : 0,
	             c->decode ? c->decode->tp_size : 0, lengths, cause, kvs_refusal_remedy(refusal));
	return false;
}
