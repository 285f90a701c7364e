/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The methods that every connector's classes have in common, whose replacements are the functions of rooms.h and
 * lift.h. An adapter puts the rows into its own tables, with the prefix of its classes ("Mooncake"), has manager_class,
 * sender_class and receiver_class, and after its prototypes KVS_COMMON_METHODS.
 */
#ifndef KVS_CONNECTORS_METHODS_H
#define KVS_CONNECTORS_METHODS_H

#include "connector.h"
#include "lift.h"
#include "rooms.h"

/* id, class, method, kind, parameters, where the class is kept */
#define KVS_SENDER_TABLE(X, prefix) \
	X(sender_init, prefix "KVSender", "__init__", KVS_METHOD, "self mgr bootstrap_addr bootstrap_room ...", \
	  &sender_class) \
	X(sender_abort, prefix "KVSender", "abort", KVS_METHOD, "self", NULL) \
	X(sender_failure, prefix "KVSender", "failure_exception", KVS_METHOD, "self", NULL) \
	X(sender_clear, prefix "KVSender", "clear", KVS_METHOD, "self", NULL)

#define KVS_RECEIVER_TABLE(X, prefix) \
	X(ensure_info, prefix "KVManager", "try_ensure_parallel_info", KVS_METHOD_IF_ANY, "self ...", NULL) \
	X(receiver_register, prefix "KVReceiver", "_register_kv_args", KVS_METHOD, "self", &receiver_class) \
	X(receiver_connect, prefix "KVReceiver", "_connect_to_bootstrap_server", KVS_CLASSMETHOD, \
	  "cls bootstrap_info", NULL) \
	X(receiver_metadata, prefix "KVReceiver", "send_metadata", KVS_METHOD, \
	  "self kv_indices aux_index state_indices", NULL) \
	X(receiver_poll, prefix "KVReceiver", "poll", KVS_METHOD, "self", NULL) \
	X(receiver_abort, prefix "KVReceiver", "abort", KVS_METHOD, "self", NULL) \
	X(receiver_failure, prefix "KVReceiver", "failure_exception", KVS_METHOD, "self", NULL) \
	X(receiver_clear, prefix "KVReceiver", "clear", KVS_METHOD, "self", NULL)

#define KVS_COMMON_METHODS \
	KVS_FORWARD(sender_init, sender_class, kvs_sender_init) \
	KVS_FORWARD(sender_abort, sender_class, kvs_sender_cancel) \
	KVS_FORWARD(sender_failure, sender_class, kvs_sender_cancel) \
	KVS_FORWARD(sender_clear, sender_class, kvs_sender_clear) \
	KVS_FORWARD(ensure_info, manager_class, kvs_lift_ensure_info) \
	KVS_FORWARD(receiver_register, receiver_class, kvs_receiver_register) \
	KVS_FORWARD(receiver_metadata, receiver_class, kvs_receiver_metadata) \
	KVS_FORWARD(receiver_poll, receiver_class, kvs_receiver_poll) \
	KVS_FORWARD(receiver_abort, receiver_class, kvs_receiver_close) \
	KVS_FORWARD(receiver_failure, receiver_class, kvs_receiver_failure) \
	KVS_FORWARD(receiver_clear, receiver_class, kvs_receiver_close) \
	static KvsPyObject *replace_receiver_connect(KvsPyObject *self, KvsPyObject *args, KvsPyObject *kwargs) \
	{ \
		return kvs_sglang_connect(original_receiver_connect, self, args, kwargs); \
	}

#endif
