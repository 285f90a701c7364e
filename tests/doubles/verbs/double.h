/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A double of libibverbs.so.1 with one device, whose READs are real between two processes of one parent: limits, rare
 * completions and failing calls that no real device can be asked for. A test loads it by its path before the product
 * opens the library by its name.
 */
#ifndef KVS_TEST_VERBS_DOUBLE_H
#define KVS_TEST_VERBS_DOUBLE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

/* Of this process; a child has its own copy. Set before the device is opened. */
struct verbs_double_device {
	int max_qp_wr;
	int max_sge;
	int max_sge_rd;
	int max_cqe;
	int max_rd_atom;      /* that it answers */
	int max_init_rd_atom; /* that it asks */
	int grant_rd_atom;    /* a queue pair that is to answer more is refused with ENOMEM; 0: any */
	uint64_t max_mr_size;
	int mtu;
	int transport_type;
	int link_layer;
	int port_state;
	int gid_type;
	uint8_t gid_last; /* byte of 10.77.0.x */
	bool ipv6;
	int fail_reg; /* the n-th registration fails (1: the first; 0: none) ... */
	int fail_reg_errno;
	int fail_qp;
	int fail_qp_errno;
	bool no_dmabuf;      /* memory cannot be registered by descriptor */
	bool peer_memory;    /* addresses of the CUDA driver's double are taken as they are */
	unsigned delay_us;   /* from post to execution */
	bool marker_refused; /* posting to a queue pair in error fails */
};

/* Of all processes. */
struct verbs_double_shared {
	atomic_int stall;     /* READs wait while it is set */
	atomic_int fail_read; /* the READ of this number fails (1: the first; 0: none) ... */
	atomic_int fail_status;
	atomic_int corrupt_read; /* the READ of this number arrives with one bit changed */
	atomic_int fatal;        /* the reading device reports that it is gone, once */
	/* Seen. */
	atomic_int registered; /* regions now */
	atomic_int registrations;
	atomic_int by_descriptor; /* of these */
	atomic_int queue_pairs;   /* now */
	atomic_int queue_pairs_made;
	atomic_int reads;
	atomic_int signaled;
	atomic_ullong bytes;
	atomic_int longest_list;
	atomic_int deepest;      /* work requests outstanding on one queue pair */
	atomic_int write_rights; /* regions or queue pairs that anybody may write */
	atomic_int read_rights;  /* regions that peers may read */
	atomic_int path_mtu;
	atomic_int rd_atom; /* outstanding READs that were asked for */
	atomic_int over;    /* READs beyond what the answering queue pair was made for */
};

struct verbs_double {
	struct verbs_double_device device;
	struct verbs_double_shared *shared;
};

/* The symbol in the library. */
extern struct verbs_double kvs_verbs_double;

#endif
