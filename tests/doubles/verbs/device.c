/* SPDX-License-Identifier: Apache-2.0 */
/* The device, its memory regions, its port. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "internal.h"

struct world *world;

struct verbs_double kvs_verbs_double = {
        .device = {.max_qp_wr = 1024,
                   .max_sge = 32,
                   .max_sge_rd = 30,
                   .max_cqe = 4096,
                   .max_rd_atom = 16,
                   .max_init_rd_atom = 16,
                   .max_mr_size = UINT64_MAX,
                   .mtu = 5,
                   .transport_type = KVS_IBV_TRANSPORT_IB,
                   .link_layer = KVS_IBV_LINK_LAYER_ETHERNET,
                   .port_state = KVS_IBV_PORT_ACTIVE,
                   .gid_type = KVS_IBV_GID_TYPE_ROCE_V2,
                   .gid_last = 1},
};

static struct kvs_ibv_device the_device;
static int registrations; /* since the device was opened */

__attribute__((constructor)) static void make_world(void)
{
	pthread_mutexattr_t attr;
	world = mmap(NULL, sizeof(*world), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (world == MAP_FAILED)
		abort();
	pthread_mutexattr_init(&attr);
	pthread_mutexattr_setpshared(&attr, PTHREAD_PROCESS_SHARED);
	pthread_mutex_init(&world->lock, &attr);
	kvs_verbs_double.shared = &world->shared;
}

struct kvs_ibv_device **ibv_get_device_list(int *count_p)
{
	struct kvs_ibv_device **list = calloc(2, sizeof(*list));
	if (list == NULL)
		abort();
	strcpy(the_device.name, "double0");
	the_device.transport_type = kvs_verbs_double.device.transport_type;
	list[0] = &the_device;
	if (count_p != NULL)
		*count_p = 1;
	return list;
}

void ibv_free_device_list(struct kvs_ibv_device **list)
{
	free(list);
}

struct kvs_ibv_context *ibv_open_device(struct kvs_ibv_device *device)
{
	struct context *context = calloc(1, sizeof(*context));
	if (context == NULL)
		abort();
	/* The other process reads our memory. */
	prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
	registrations = 0;
	context->ibv.device = device;
	context->ibv.ops.poll_cq = double_poll_cq;
	context->ibv.ops.req_notify_cq = double_req_notify_cq;
	context->ibv.ops.post_send = double_post_send;
	context->ibv.cmd_fd = eventfd(0, EFD_CLOEXEC);
	context->ibv.async_fd = eventfd(0, EFD_CLOEXEC);
	context->last = &context->first;
	pthread_mutex_init(&context->lock, NULL);
	pthread_cond_init(&context->changed, NULL);
	if (pthread_create(&context->thread, NULL, double_engine, context) != 0)
		abort();
	return &context->ibv;
}

int ibv_close_device(struct kvs_ibv_context *ibv)
{
	struct context *context = (struct context *)ibv;
	pthread_mutex_lock(&context->lock);
	context->stop = true;
	pthread_cond_broadcast(&context->changed);
	pthread_mutex_unlock(&context->lock);
	pthread_join(context->thread, NULL);
	close(context->ibv.cmd_fd);
	close(context->ibv.async_fd);
	free(context);
	return 0;
}

int ibv_query_device(struct kvs_ibv_context *ibv, struct kvs_ibv_device_attr *attr_p)
{
	const struct verbs_double_device *device = &kvs_verbs_double.device;
	(void)ibv;
	memset(attr_p, 0, sizeof(*attr_p));
	attr_p->max_mr_size = device->max_mr_size;
	attr_p->max_qp_wr = device->max_qp_wr;
	attr_p->max_sge = device->max_sge;
	attr_p->max_sge_rd = device->max_sge_rd;
	attr_p->max_cqe = device->max_cqe;
	attr_p->max_qp_rd_atom = device->max_rd_atom;
	attr_p->max_qp_init_rd_atom = device->max_init_rd_atom;
	attr_p->phys_port_cnt = 1;
	return 0;
}

int ibv_query_port(struct kvs_ibv_context *ibv, uint8_t port, struct kvs_ibv_port_attr *attr_p)
{
	(void)ibv;
	if (port != 1)
		return EINVAL;
	attr_p->state = kvs_verbs_double.device.port_state;
	attr_p->active_mtu = kvs_verbs_double.device.mtu;
	attr_p->gid_tbl_len = 4;
	attr_p->max_msg_sz = 1u << 30;
	attr_p->lid = 7;
	attr_p->link_layer = (uint8_t)kvs_verbs_double.device.link_layer;
	return 0;
}

int _ibv_query_gid_ex(struct kvs_ibv_context *ibv, uint32_t port, uint32_t index, struct kvs_ibv_gid_entry *entry_p,
                      uint32_t flags, size_t size)
{
	(void)ibv;
	(void)flags;
	if (port != 1 || index > 1 || size != sizeof(*entry_p))
		return ENODATA;
	memset(entry_p, 0, sizeof(*entry_p));
	entry_p->gid_index = index;
	entry_p->port_num = port;
	entry_p->gid_type = index == 0 ? KVS_IBV_GID_TYPE_ROCE_V1 : (uint32_t)kvs_verbs_double.device.gid_type;
	uint8_t *raw = entry_p->gid.raw;
	if (index == 0) {
		raw[0] = 0xfe;
		raw[1] = 0x80;
	} else if (kvs_verbs_double.device.ipv6) {
		raw[0] = 0x20;
	} else {
		raw[10] = raw[11] = 0xff;
		raw[12] = 10;
		raw[13] = 77;
	}
	raw[15] = kvs_verbs_double.device.gid_last;
	return 0;
}

struct kvs_ibv_pd *ibv_alloc_pd(struct kvs_ibv_context *context)
{
	struct kvs_ibv_pd *pd = calloc(1, sizeof(*pd));
	if (pd != NULL)
		pd->context = context;
	return pd;
}

int ibv_dealloc_pd(struct kvs_ibv_pd *pd)
{
	free(pd);
	return 0;
}

bool double_find_mapping(pid_t pid, uint64_t address, char path_p[256], uint64_t *file_p, uint64_t *offset_p)
{
	char line[512];
	bool found = false;
	(void)snprintf(line, sizeof(line), "/proc/%d/maps", (int)pid);
	FILE *maps = fopen(line, "re");
	while (maps != NULL && !found && fgets(line, sizeof(line), maps) != NULL) {
		unsigned long long begin, end, offset, inode;
		path_p[0] = '\0';
		if (sscanf(line, "%llx-%llx %*s %llx %*s %llu %255[^\n]", &begin, &end, &offset, &inode, path_p) < 4)
			continue;
		found = address >= begin && address < end;
		*file_p = inode;
		*offset_p = offset + (address - begin);
	}
	if (maps != NULL)
		fclose(maps);
	return found;
}

static bool is_gpu_memory(uint64_t address)
{
	char path[256];
	uint64_t file, offset;
	return double_find_mapping(getpid(), address, path, &file, &offset) && strstr(path, "kvs-double-cuda-") != NULL;
}

static struct kvs_ibv_mr *add_region(struct kvs_ibv_pd *pd, void *address, size_t length, int access)
{
	const struct verbs_double_device *device = &kvs_verbs_double.device;
	if (length > device->max_mr_size) {
		errno = EINVAL;
		return NULL;
	}
	struct kvs_ibv_mr *mr = calloc(1, sizeof(*mr));
	if (mr == NULL)
		return NULL;
	pthread_mutex_lock(&world->lock);
	uint32_t i = 0;
	while (i < REGIONS && world->regions[i].live)
		i++;
	if (i == REGIONS)
		abort();
	struct region *region = &world->regions[i];
	region->pid = getpid();
	region->key = ++world->last << 13 | i;
	region->access = access;
	region->address = (uint64_t)(uintptr_t)address;
	region->length = length;
	region->file = 0;
	region->live = 1;
	pthread_mutex_unlock(&world->lock);
	world->shared.registered++;
	world->shared.registrations++;
	if ((access & KVS_IBV_ACCESS_REMOTE_WRITE) != 0)
		world->shared.write_rights++;
	if ((access & KVS_IBV_ACCESS_REMOTE_READ) != 0)
		world->shared.read_rights++;
	mr->context = pd->context;
	mr->pd = pd;
	mr->addr = address;
	mr->length = length;
	mr->lkey = mr->rkey = region->key;
	return mr;
}

struct kvs_ibv_mr *ibv_reg_mr(struct kvs_ibv_pd *pd, void *address, size_t length, int access)
{
	const struct verbs_double_device *device = &kvs_verbs_double.device;
	if (++registrations == device->fail_reg) {
		errno = device->fail_reg_errno;
		return NULL;
	}
	/* As a kernel without a module for it: there are no pages of the host at such an address. */
	if (!device->peer_memory && is_gpu_memory((uint64_t)(uintptr_t)address)) {
		errno = EFAULT;
		return NULL;
	}
	return add_region(pd, address, length, access);
}

/* The descriptor must be that of the memory at the address; its position is where its range begins (cuda/rdma.c). */
struct kvs_ibv_mr *ibv_reg_dmabuf_mr(struct kvs_ibv_pd *pd, uint64_t offset, size_t length, uint64_t address, int fd,
                                     int access)
{
	char path[256];
	uint64_t file = 0, at = 0;
	struct stat status;
	off_t begin = lseek(fd, 0, SEEK_CUR);
	if (kvs_verbs_double.device.no_dmabuf) {
		errno = EOPNOTSUPP;
		return NULL;
	}
	if (fstat(fd, &status) != 0 || begin < 0 || !double_find_mapping(getpid(), address, path, &file, &at) ||
	    file != status.st_ino || at != (uint64_t)begin + offset || at + length > (uint64_t)status.st_size) {
		errno = EINVAL;
		return NULL;
	}
	struct kvs_ibv_mr *mr = add_region(pd, (void *)(uintptr_t)address, length, access);
	if (mr != NULL) {
		world->regions[mr->lkey % REGIONS].file = file;
		world->shared.by_descriptor++;
	}
	return mr;
}

int ibv_dereg_mr(struct kvs_ibv_mr *mr)
{
	struct region *region = &world->regions[mr->lkey % REGIONS];
	if (!region->live || region->key != mr->lkey)
		abort();
	region->live = 0;
	world->shared.registered--;
	free(mr);
	return 0;
}

int ibv_get_async_event(struct kvs_ibv_context *ibv, struct kvs_ibv_async_event *event_p)
{
	uint64_t value;
	if (read(ibv->async_fd, &value, sizeof(value)) != sizeof(value))
		return -1;
	event_p->event_type = KVS_IBV_EVENT_DEVICE_FATAL;
	return 0;
}

void ibv_ack_async_event(struct kvs_ibv_async_event *event)
{
	(void)event;
}

int ibv_is_fork_initialized(void)
{
	return 2;
}

const char *ibv_wc_status_str(int status)
{
	switch (status) {
	case 0:
		return "success";
	case 4:
		return "local protection error";
	case 5:
		return "Work Request Flushed Error";
	case 10:
		return "remote access error";
	case 12:
		return "transport retry counter exceeded";
	default:
		return "other";
	}
}
