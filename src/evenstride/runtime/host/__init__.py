"""What this machine is and how busy it is: resources, load, network addresses.

Each module answers one question; start with `machine_resources`.
"""
