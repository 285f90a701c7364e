/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Some releases let a decode refuse a prefill of another TP size before anything is sent, by an exception that ends the
 * decode's scheduler. Such a refusal is lifted provisionally: the prefill's topology is taken in all the same, and a
 * room's page lists go out only when the prefill's agents have agreed over the control connection. Where they have not
 * within 5 s the room fails with the release's own text. Interpreter lock held.
 */
#ifndef KVS_CONNECTORS_LIFT_H
#define KVS_CONNECTORS_LIFT_H

#include "rooms.h"

/* try_ensure_parallel_info(bootstrap_addr). Result and exception are the original's, but for a refusal that is lifted.
 */
KvsPyObject *kvs_lift_ensure_info(const struct kvs_replaced *call);

/* The refusal that was lifted for this receiver's prefill; false: none was. */
bool kvs_lift_text(KvsPyObject *receiver, char *text_p, size_t size);

enum kvs_lift {
	KVS_LIFT_AGREED, /* nothing was lifted, or the prefill's agents have agreed: the room may be opened */
	KVS_LIFT_HELD,   /* not yet */
	KVS_LIFT_OVER,   /* and the time is over: the room fails with text */
};

/*
 * send_metadata: is the call to go on? KVS_LIFT_HELD: it is kept in the receiver, for kvs_lift_poll. May wait 0.1 s,
 * with the interpreter lock released, for a prefill that has just been registered with.
 */
enum kvs_lift kvs_lift_metadata(const struct kvs_replaced *call);

/*
 * poll: how the call stands that is kept in this receiver (none: KVS_LIFT_AGREED with *held_p NULL). KVS_LIFT_AGREED
 * hands it out: a tuple (original, args, kwargs or None), new.
 */
enum kvs_lift kvs_lift_poll(KvsPyObject *receiver, KvsPyObject **held_p);

/* The room has ended otherwise. */
void kvs_lift_drop(KvsPyObject *receiver);

#endif
