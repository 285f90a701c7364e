/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The life of a room as SGLang's senders and receivers show it, the same for every connector: each function stands for
 * the replaced method and calls the original. Interpreter lock held; results and exceptions are the original's.
 */
#ifndef KVS_CONNECTORS_ROOMS_H
#define KVS_CONNECTORS_ROOMS_H

#include "sglang.h"

/* KVPoll, sglang/srt/disaggregation/base/conn.py, 0.5.12 to 0.5.23 */
#define KVS_POLL_FAILED  0
#define KVS_POLL_WAITING 2
#define KVS_POLL_SUCCESS 4

struct kvs_replaced {
	KvsPyObject *original;
	KvsPyObject *self;
	KvsPyObject *args;
	KvsPyObject *kwargs;
};

/* In a replacement called replace_<id>: the call that it stands for. */
#define KVS_CALL(id) (&(struct kvs_replaced){original_##id, self, args, kwargs})

/* A replacement that is a shared function, for objects of exactly our class. */
#define KVS_FORWARD(id, class_object, function) \
	static KvsPyObject *replace_##id(KvsPyObject *self, KvsPyObject *args, KvsPyObject *kwargs) \
	{ \
		return kvs_py_is_exact(self, class_object) ? function(KVS_CALL(id)) : kvs_replaced_call(KVS_CALL(id)); \
	}

/* The original, called. */
KvsPyObject *kvs_replaced_call(const struct kvs_replaced *call);

/* ---- sender ---- */

/* __init__: a new sender owns its room number; what is left of an earlier use is forgotten. */
KvsPyObject *kvs_sender_init(const struct kvs_replaced *call);

/* abort, failure_exception: the source pages may be reused when the original returns. */
KvsPyObject *kvs_sender_cancel(const struct kvs_replaced *call);

/* clear: cancelled, unless the transfer succeeded. */
KvsPyObject *kvs_sender_clear(const struct kvs_replaced *call);

/* ---- receiver ---- */

/* _register_kv_args: our endpoint record travels with the registration message. */
KvsPyObject *kvs_receiver_register(const struct kvs_replaced *call);

/*
 * send_metadata(kv_indices, aux_index, state_indices, ...): the room is open at our agent before the message is sent,
 * and the message carries its generation.
 */
KvsPyObject *kvs_receiver_metadata(const struct kvs_replaced *call);

/* poll: our agent's verdict comes first; a concluded room is closed before the result is returned. */
KvsPyObject *kvs_receiver_poll(const struct kvs_replaced *call);

/* failure_exception: as below, and the exception carries our reason where there is one. */
KvsPyObject *kvs_receiver_failure(const struct kvs_replaced *call);

/* abort, clear: nothing of ours is written to the room's pages once the original runs. */
KvsPyObject *kvs_receiver_close(const struct kvs_replaced *call);

#endif
