"""Resources, load and network addresses of this machine.

Start with `machine_resources`; `network_interfaces` has the addresses.
"""
