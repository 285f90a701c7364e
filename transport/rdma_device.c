/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "rdma_device.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "link.h"
#include "log.h"

/* From linux/mempolicy.h. */
#define GET_NODE_OF_ADDRESS 3

static struct kvs_rdma_device devices[KVS_RDMA_DEVICES];
static uint32_t device_count;
static struct kvs_rdma_offer opened;
static bool is_open;

int kvs_rdma_memory_node(uint64_t address)
{
	int node = -1;
	if (syscall(SYS_get_mempolicy, &node, NULL, 0, (void *)(uintptr_t)address, GET_NODE_OF_ADDRESS) != 0)
		return -1;
	return node;
}

int kvs_rdma_node_in(const char *path)
{
	int node = -1;
	FILE *file = fopen(path, "re");
	if (file == NULL)
		return -1;
	if (fscanf(file, "%d", &node) != 1)
		node = -1;
	fclose(file);
	return node;
}

static int device_node(const struct kvs_ibv_device *device)
{
	char path[KVS_IBV_PATH_MAX + 32];
	(void)snprintf(path, sizeof(path), "%.*s/device/numa_node", KVS_IBV_PATH_MAX, device->ibdev_path);
	return kvs_rdma_node_in(path);
}

/* "mlx5_0" or "mlx5_0:1". */
static bool wanted(const char *choice, const char *name, uint32_t port)
{
	char with_port[KVS_IBV_NAME_MAX + 16];
	if (choice == NULL || choice[0] == '\0')
		return true;
	(void)snprintf(with_port, sizeof(with_port), "%.*s:%u", KVS_IBV_NAME_MAX, name, port);
	return strcmp(choice, name) == 0 || strcmp(choice, with_port) == 0;
}

static void note(struct kvs_text *why, const char *name, uint32_t port, const char *what)
{
	size_t used = strlen(why->s);
	(void)snprintf(why->s + used, sizeof(why->s) - used, "%s%.*s port %u: %s", used > 0 ? "; " : "",
	               KVS_IBV_NAME_MAX, name, port, what);
}

static bool is_zero(const uint8_t raw[16])
{
	static const uint8_t zero[16];
	return memcmp(raw, zero, 16) == 0;
}

static void find_gids(struct kvs_rdma_port *port, int table_size, int gid_index)
{
	const struct kvs_verbs *verbs = port->device->verbs;
	for (int i = 0; i < table_size && i < 256 && port->gid_count < KVS_RDMA_GIDS; i++) {
		struct kvs_ibv_gid_entry entry;
		memset(&entry, 0, sizeof(entry));
		if ((gid_index >= 0 && i != gid_index) ||
		    verbs->query_gid_ex(port->device->context, port->number, (uint32_t)i, &entry, 0, sizeof(entry)) !=
		            0 ||
		    is_zero(entry.gid.raw))
			continue;
		struct kvs_rdma_gid *gid = &port->gids[port->gid_count++];
		memcpy(gid->raw, entry.gid.raw, sizeof(gid->raw));
		gid->type = entry.gid_type;
		gid->index = (uint32_t)i;
	}
}

static void find_port(struct kvs_rdma_device *device, uint32_t number, int gid_index, struct kvs_rdma_offer *offer)
{
	struct kvs_ibv_port_attr attr;
	memset(&attr, 0, sizeof(attr));
	int error = device->verbs->query_port(device->context, (uint8_t)number, &attr);
	if (error != 0) {
		note(&offer->why, device->name, number, strerror(error));
		return;
	}
	if (attr.state != KVS_IBV_PORT_ACTIVE) {
		note(&offer->why, device->name, number, "not active");
		return;
	}
	struct kvs_rdma_port *port = &offer->ports[offer->port_count];
	memset(port, 0, sizeof(*port));
	port->device = device;
	port->number = number;
	port->link_layer = attr.link_layer == KVS_IBV_LINK_LAYER_ETHERNET ? KVS_IBV_LINK_LAYER_ETHERNET
	                                                                  : KVS_IBV_LINK_LAYER_INFINIBAND;
	port->lid = attr.lid;
	port->mtu = (uint32_t)attr.active_mtu;
	port->max_message = attr.max_msg_sz;
	/* A device that says 0 still answers one at a time, or it could not answer READs at all. */
	port->rd_atom = device->attr.max_qp_rd_atom > 0 ? (uint32_t)device->attr.max_qp_rd_atom : 1;
	find_gids(port, attr.gid_tbl_len, gid_index);
	if (port->gid_count > 0)
		offer->port_count++;
	else
		note(&offer->why, device->name, number,
		     gid_index >= 0 ? "no GID at the index of KVSPLICE_RDMA_GID_INDEX" : "no GID");
}

static bool open_device(struct kvs_rdma_device *device, const struct kvs_verbs *verbs, struct kvs_ibv_device *found,
                        struct kvs_text *why)
{
	memset(device, 0, sizeof(*device));
	device->verbs = verbs;
	(void)snprintf(device->name, sizeof(device->name), "%.*s", KVS_IBV_NAME_MAX - 1, found->name);
	device->numa = device_node(found);
	device->context = verbs->open_device(found);
	if (device->context == NULL) {
		note(why, device->name, 0, strerror(errno));
		return false;
	}
	int error = verbs->query_device(device->context, &device->attr);
	if (error == 0) {
		errno = ENOMEM;
		device->pd = verbs->alloc_pd(device->context);
		error = device->pd == NULL ? errno : 0;
	}
	if (error != 0) {
		note(why, device->name, 0, strerror(error));
		verbs->close_device(device->context);
		return false;
	}
	/* The agent reads its events as they come and must never wait for one. */
	int flags = fcntl(device->context->async_fd, F_GETFL);
	if (flags >= 0)
		(void)fcntl(device->context->async_fd, F_SETFL, flags | O_NONBLOCK);
	if (kvs_state.epoll >= 0)
		(void)kvs_watch_add(device->context->async_fd, EPOLLIN, KVS_WATCH_VERBS, device_count);
	return true;
}

static void close_device(struct kvs_rdma_device *device)
{
	device->verbs->dealloc_pd(device->pd);
	device->verbs->close_device(device->context);
	device->context = NULL;
}

/* Kernels before 5.12 give the parent of a fork a copy of a page that it writes to, and the device keeps the old one.
 */
static void warn_of_forks(const struct kvs_verbs *verbs)
{
	if (verbs->is_fork_initialized != NULL && verbs->is_fork_initialized() == KVS_IBV_FORK_DISABLED)
		kvs_log(KVS_LOG_WARN, "this kernel does not keep registered memory safe when the process forks: set "
		                      "RDMAV_FORK_SAFE=1 or use Linux 5.12 or later");
}

static void open_all(const char *choice, int gid_index, struct kvs_rdma_offer *offer)
{
	const struct kvs_verbs *verbs = kvs_verbs_load(&offer->why);
	int found = 0;
	if (verbs == NULL)
		return;
	struct kvs_ibv_device **list = verbs->get_device_list(&found);
	for (int i = 0; list != NULL && i < found && device_count < KVS_RDMA_DEVICES; i++) {
		struct kvs_rdma_device *device = &devices[device_count];
		uint32_t before = offer->port_count;
		if (list[i]->transport_type != KVS_IBV_TRANSPORT_IB) {
			note(&offer->why, list[i]->name, 1,
			     list[i]->transport_type == KVS_IBV_TRANSPORT_IWARP
			             ? "iWARP, whose READs need memory that the peer may write"
			             : "not a device with reliable connections");
			continue;
		}
		if (!open_device(device, verbs, list[i], &offer->why))
			continue;
		for (uint32_t port = 1; port <= device->attr.phys_port_cnt && offer->port_count < KVS_RDMA_PORTS;
		     port++) {
			if (wanted(choice, device->name, port))
				find_port(device, port, gid_index, offer);
		}
		if (offer->port_count > before)
			device_count++;
		else
			close_device(device);
	}
	if (list != NULL)
		verbs->free_device_list(list);
	if (offer->port_count > 0)
		warn_of_forks(verbs);
	else if (offer->why.s[0] == '\0' && choice != NULL && choice[0] != '\0')
		kvs_text_set(&offer->why, "no device %s (KVSPLICE_RDMA_DEVICE)", choice);
	else if (offer->why.s[0] == '\0')
		kvs_text_set(&offer->why, "no RDMA device");
}

void kvs_rdma_devices_open(const char *device, int gid_index, struct kvs_rdma_offer *offer_p)
{
	if (!is_open) {
		memset(&opened, 0, sizeof(opened));
		device_count = 0;
		is_open = true;
		open_all(device, gid_index, &opened);
	}
	*offer_p = opened;
}

void kvs_rdma_devices_close(void)
{
	for (uint32_t i = 0; i < device_count; i++)
		close_device(&devices[i]);
	device_count = 0;
	is_open = false;
}

void kvs_rdma_devices_forget(void)
{
	for (uint32_t i = 0; i < device_count; i++) {
		close(devices[i].context->cmd_fd);
		close(devices[i].context->async_fd);
	}
	device_count = 0;
	is_open = false;
}

void kvs_rdma_device_event(uint64_t number)
{
	struct kvs_ibv_async_event event;
	if (number >= device_count)
		return;
	struct kvs_rdma_device *device = &devices[number];
	while (device->verbs->get_async_event(device->context, &event) == 0) {
		int type = event.event_type;
		device->verbs->ack_async_event(&event);
		if (type != KVS_IBV_EVENT_DEVICE_FATAL || atomic_load(&device->fatal))
			continue;
		kvs_log(KVS_LOG_WARN, "device %s has reported a fatal error: it carries nothing more", device->name);
		atomic_store(&device->fatal, true);
	}
}
