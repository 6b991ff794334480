"""The nftables rules as text. Pure; applied by `_nft`, one transaction per text.

Two walls, so that neither has to be perfect:

- in each slot's namespace, table `inet aenv`: NAT, and the sandbox's own policy as the set `allowed`. The rules never
  change: adding to an empty set takes 0.4 ms, while taking out a rule or an element waits 10 ms for the kernel (RCU),
  which is paid when a slot is given back;
- on the host, one table `inet aenv_<tag>` per node that matches slots by the prefix of their interface and so never
  changes while slots come and go. It holds even if a guest broke out into its namespace.

The guest sees all connections from the host as coming from its gateway. Only the host's own end of the veth pair is
translated inward, so that a late packet of an earlier sandbox's peer never reaches the next guest at this address.
"""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network

from agentenv.model import NetworkPolicy
from agentenv.network.slot import GATEWAY_ADDRESS, GUEST_ADDRESS, TAP, UPLINK, VETH_PREFIX, SlotPlan

# Never reachable from a guest, whatever its policy says. The documentation ranges are left out: nobody routes them.
NEVER = tuple(
    IPv4Network(text)
    for text in (
        "0.0.0.0/8",
        "10.0.0.0/8",
        "100.64.0.0/10",
        "127.0.0.0/8",
        "169.254.0.0/16",
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.168.0.0/16",
        "198.18.0.0/15",
        "224.0.0.0/4",
        "240.0.0.0/4",
    )
)
# Connections that the guest opened outward carry this mark, so that a tightened policy cuts them and leaves the host's
# own connections to the guest alone.
EGRESS_MARK = 0xAE
# Flows outward of one guest at a time. Each takes 0.3 KiB of the kernel's memory, and a place in the host's own table
# of 262,144, where one guest must not crowd out the others.
FLOW_COUNT_MAX = 8192


def private_resolvers(dns: Iterable[str]) -> list[str]:
    """The configured resolvers that need an exception of their own, since they are in a denied range."""
    return [address for address in dns if any(IPv4Address(address) in network for network in NEVER)]


def _sets(subnet: IPv4Network, dns: Iterable[str]) -> str:
    networks = [*NEVER]
    if not any(subnet.subnet_of(network) for network in networks):
        networks.append(subnet)
    resolvers = private_resolvers(dns)
    elements = f"elements = {{ {', '.join(resolvers)} }};" if resolvers else ""
    return f"""
  set never {{ type ipv4_addr; flags interval; elements = {{ {", ".join(map(str, networks))} }}; }}
  set resolvers {{ type ipv4_addr; {elements} }}"""


def slot_table(plan: SlotPlan, subnet: IPv4Network, index: int) -> str:
    """The whole table of a new slot, with all egress refused until a policy is set."""
    host, slot = plan.host_address(index), plan.slot_address(index)
    return f"""
table inet aenv {{{_sets(subnet, plan.dns)}
  set allowed {{ type ipv4_addr; flags interval; }}
  chain refuse {{
    meta l4proto tcp reject with tcp reset
    reject with icmpx admin-prohibited
  }}
  chain pass {{
    ct count over {FLOW_COUNT_MAX} goto refuse
    ct mark set {EGRESS_MARK:#x} accept
  }}
  chain egress {{
    ip daddr != @allowed goto refuse
    ip daddr @resolvers meta l4proto {{ tcp, udp }} th dport 53 goto pass
    ip daddr @never goto refuse
    goto pass
  }}
  chain input {{
    type filter hook input priority filter; policy drop;
  }}
  chain forward {{
    type filter hook forward priority filter; policy drop;
    ct state invalid drop
    ct state established,related accept
    iifname "{UPLINK}" oifname "{TAP}" ct status dnat accept
    iifname "{TAP}" oifname "{UPLINK}" ip saddr {GUEST_ADDRESS} goto egress
  }}
  chain inward {{
    type nat hook prerouting priority dstnat; policy accept;
    iifname "{UPLINK}" ip saddr {host} ip daddr {slot} dnat ip to {GUEST_ADDRESS}
  }}
  chain outward {{
    type nat hook postrouting priority srcnat; policy accept;
    oifname "{TAP}" snat ip to {GATEWAY_ADDRESS}
    oifname "{UPLINK}" ip saddr {GUEST_ADDRESS} snat ip to {slot}
  }}
}}
"""


def policy_rules(policy: NetworkPolicy) -> str:
    """Replaces a slot's policy; applied as one transaction there is no instant with neither the old nor the new one."""
    lines = ["flush set inet aenv allowed"]
    if policy.allow_internet:
        lines.append("add element inet aenv allowed { 0.0.0.0/0 }")
    return "\n".join(lines) + "\n"


def host_table_name(tag: str) -> str:
    return f"aenv_{tag}"


def remove_host_table(tag: str) -> str:
    """Removes the node's table whether or not it exists."""
    name = host_table_name(tag)
    return f"table inet {name} {{ }}\ndelete table inet {name}\n"


def host_table(plan: SlotPlan, subnet: IPv4Network) -> str:
    """Replaces the node's own table; touches no other. Our hooks come before the usual filter priority: a drop here is
    final, while an accept here still leaves the packet to the host's own firewall.
    """
    slots = f'"{plan.veth_prefix}*"'
    return f"""{remove_host_table(plan.tag)}
table inet {host_table_name(plan.tag)} {{{_sets(subnet, plan.dns)}
  chain input {{
    type filter hook input priority filter - 10; policy accept;
    iifname {slots} ct state established,related accept
    iifname {slots} ip daddr @resolvers meta l4proto {{ tcp, udp }} th dport 53 accept
    iifname {slots} drop
  }}
  chain forward {{
    type filter hook forward priority filter - 10; policy accept;
    iifname {slots} jump outward
    oifname {slots} ct state established,related accept
    oifname {slots} drop
  }}
  chain outward {{
    meta nfproto != ipv4 drop
    ip saddr != {plan.block} drop
    oifname "{VETH_PREFIX}*" drop
    tcp flags & (syn | rst) == syn tcp option maxseg size set rt mtu
    ip daddr @resolvers meta l4proto {{ tcp, udp }} th dport 53 accept
    ip daddr @never drop
    accept
  }}
  chain masquerading {{
    type nat hook postrouting priority srcnat; policy accept;
    ip saddr {plan.block} oifname != {slots} masquerade
  }}
}}
"""
