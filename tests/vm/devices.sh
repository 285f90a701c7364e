# SPDX-License-Identifier: Apache-2.0
# To be read by bash inside the machine: software RDMA devices.

# rxe0 on a network interface of its own, 10.77.0.1. Its active MTU is the largest power of two below the interface's.
one_device() {
	ip link add rxenet mtu "${1:-1500}" type dummy
	ip addr add 10.77.0.1/24 dev rxenet
	ip link set rxenet up
	rdma link add rxe0 type rxe netdev rxenet
}

# rxea and rxeb at the two ends of a cable, 10.78.0.1 and 10.78.0.2, so that loss, delay and cut links act on what they
# send each other: the rule that keeps local addresses local is moved behind tables that send them over the cable.
two_devices() {
	local mtu_a=${1:-4200} mtu_b=${2:-4200} name
	ip link add va mtu "$mtu_a" type veth peer name vb mtu "$mtu_b"
	for name in va vb; do
		ip link set $name up
		echo 1 > /proc/sys/net/ipv4/conf/$name/accept_local
		echo 0 > /proc/sys/net/ipv4/conf/$name/rp_filter
	done
	echo 0 > /proc/sys/net/ipv4/conf/all/rp_filter
	ip addr add 10.78.0.1/24 dev va
	ip addr add 10.78.0.2/24 dev vb
	ip rule add pref 5 iif va lookup local
	ip rule add pref 6 iif vb lookup local
	ip rule add pref 10 to 10.78.0.2 oif va lookup 10
	ip rule add pref 11 to 10.78.0.1 oif vb lookup 11
	# The same for what is bound to an address and to no interface (TCP).
	ip rule add pref 12 from 10.78.0.1 to 10.78.0.2 iif lo lookup 10
	ip rule add pref 13 from 10.78.0.2 to 10.78.0.1 iif lo lookup 11
	device_routes
	ip rule add pref 100 lookup local
	ip rule del pref 0
	rdma link add rxea type rxe netdev va
	rdma link add rxeb type rxe netdev vb
}

# Routes and neighbours of the cable; they go when an interface is taken down.
device_routes() {
	ip route replace 10.78.0.2 dev va src 10.78.0.1 table 10
	ip route replace 10.78.0.1 dev vb src 10.78.0.2 table 11
	ip neigh replace 10.78.0.2 lladdr "$(cat /sys/class/net/vb/address)" dev va nud permanent
	ip neigh replace 10.78.0.1 lladdr "$(cat /sys/class/net/va/address)" dev vb nud permanent
}
