/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVS_POLICY_TEXT_H
#define KVS_POLICY_TEXT_H

/* A message for people: what went wrong, with its numbers. Owned by the caller, always NUL-terminated. */
#define KVS_TEXT_SIZE 512

struct kvs_text {
	char s[KVS_TEXT_SIZE];
};

/* Format into text, truncating. Any thread; text may be NULL (the message is dropped). */
void kvs_text_set(struct kvs_text *text, const char *format, ...) __attribute__((format(printf, 2, 3)));

#endif
